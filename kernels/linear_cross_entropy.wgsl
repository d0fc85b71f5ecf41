// Cross-entropy of a block of logits: a workgroup for each row. The products around it are linear's.

struct Uniforms {
    vocab_size: u32,
    quads: u32, // vec4s in a row of logits; what lies past vocab_size is not read
    first: u32, // the token of the block's first row
    rows: u32,
    gradient: u32,
    nan: u32, // the bits of a NaN: WGSL has no such constant
}

@group(0) @binding(0) var<uniform> uniforms: Uniforms;

const LANES = 256u;
const LOWEST = -3.0e38;
const NO_COLUMN = 0xffffffffu;

var<workgroup> tops: array<f32, 256>;
var<workgroup> sums: array<f32, 256>;
var<workgroup> bits: array<u32, 256>;

@group(0) @binding(1) var<storage, read> targets: array<i32>;
@group(0) @binding(2) var<storage, read_write> logits: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> losses: array<f32>;

fn columns(quad: u32) -> vec4<u32> {
    return vec4<u32>(4u * quad) + vec4<u32>(0u, 1u, 2u, 3u);
}

// e^x for x <= 0, and 0 below e^-87.
fn exps(x: vec4<f32>) -> vec4<f32> {
    return select(vec4<f32>(), exp(clamp(x, vec4<f32>(-87.0), vec4<f32>())), x > vec4<f32>(-87.0));
}

// loss = log(sum exp(logits)) - logits[target], and logits become softmax - onehot where asked to; both are 0 where
// the target is negative, and NaN where a logit is not finite, which its bits say: comparisons may be folded.
@compute @workgroup_size(LANES)
fn forward(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.x + group.y * groups.x;
    let here = row < uniforms.rows;
    let quads = select(0u, uniforms.quads, here);
    let start = row * uniforms.quads;
    let t = uniforms.first + min(row, uniforms.rows - 1u);
    let wanted = targets[t];
    let counted = wanted >= 0 && u32(wanted) < uniforms.vocab_size;
    let picked = select(0u, u32(wanted), counted);

    var top = LOWEST;
    var sum = 0.0;
    var largest = 0u;
    for (var q = lane; q < quads; q += LANES) {
        let inside = columns(q) < vec4<u32>(uniforms.vocab_size);
        let value = select(vec4<f32>(LOWEST), logits[start + q], inside);
        let magnitude = bitcast<vec4<u32>>(value) & vec4<u32>(0x7fffffffu);
        largest = max(largest, max(max(magnitude.x, magnitude.y), max(magnitude.z, magnitude.w)));
        let peak = max(max(value.x, value.y), max(value.z, value.w));
        if peak > top {
            sum *= safe_exp(top - peak);
            top = peak;
        }
        let e = exps(value - top);
        sum += (e.x + e.y) + (e.z + e.w);
    }
    tops[lane] = top;
    sums[lane] = sum;
    bits[lane] = largest;
    workgroupBarrier();
    for (var reach = LANES / 2u; reach > 0u; reach /= 2u) {
        if lane < reach {
            let both = max(tops[lane], tops[lane + reach]);
            sums[lane] = sums[lane] * safe_exp(tops[lane] - both)
                + sums[lane + reach] * safe_exp(tops[lane + reach] - both);
            tops[lane] = both;
            bits[lane] = max(bits[lane], bits[lane + reach]);
        }
        workgroupBarrier();
    }
    top = tops[0];
    let finite = bits[0] < 0x7f800000u;
    let nan = bitcast<f32>(uniforms.nan);
    if here && lane == 0u {
        let loss = log(sums[0]) + (top - logits[start + picked / 4u][picked % 4u]);
        losses[t] = select(0.0, select(nan, loss, finite), counted);
    }
    // the target's logit is read before it is overwritten
    storageBarrier();
    workgroupBarrier();
    if uniforms.gradient == 0u {
        return;
    }
    let factor = select(0.0, 1.0 / sums[0], counted);
    for (var q = lane; q < quads; q += LANES) {
        let onehot = select(vec4<f32>(), vec4<f32>(1.0), columns(q) == vec4<u32>(select(NO_COLUMN, picked, counted)));
        let p = exps(logits[start + q] - top) * factor - onehot;
        logits[start + q] = select(vec4<f32>(nan), p, vec4<bool>(finite || !counted));
    }
}

@group(0) @binding(1) var<storage, read> terms: array<f32>;
@group(0) @binding(2) var<storage, read_write> partials: array<f32>;

// partials[group] = the sum of TERMS of `rows` terms.
@compute @workgroup_size(LANES)
fn forward_total(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let end = min((group.x + 1u) * TERMS, uniforms.rows);
    var sum = 0.0;
    for (var i = group.x * TERMS + lane; i < end; i += LANES) {
        sum += terms[i];
    }
    sums[lane] = sum;
    workgroupBarrier();
    for (var reach = LANES / 2u; reach > 0u; reach /= 2u) {
        if lane < reach {
            sums[lane] += sums[lane + reach];
        }
        workgroupBarrier();
    }
    if lane == 0u {
        partials[group.x] = sums[0];
    }
}
