// The partial sums of squares of one tensor: a pair for each block, put together in float64 on the host.

struct Uniforms {
    elements: u32,
    first: u32, // where the tensor's pairs begin
}

@group(0) @binding(0) var<uniform> uniforms: Uniforms;
@group(0) @binding(1) var<storage, read> gradient: array<vec4<f32>>; // the last may reach past the elements
@group(0) @binding(2) var<storage, read_write> partials: array<vec2<u32>>;

const LANES = 256u;

var<workgroup> tops: array<u32, 256>;
var<workgroup> sums: array<f32, 256>;

// The exponent's bits of the power of two that brings the largest |g|, given by its bits, to between 1 and 4
// (denormals: as near as there is).
fn exponent_of(bits: u32) -> u32 {
    return clamp(254u - min(bits >> 23u, 254u), 1u, 253u);
}

// A sum of (g 2^exponent_of(before))^2 turned into one with exponent_of(after), after >= before.
fn rescaled(sum: f32, before: u32, after: u32) -> f32 {
    let steps = exponent_of(before) - exponent_of(after);
    let ratio = bitcast<f32>((127u - min(steps, 127u)) << 23u);
    return sum * ratio * ratio;
}

// partial = (bits of max|g|, bits of sum (g 2^exponent)^2). Bits order as |g| does, infinity and NaN above all numbers.
@compute @workgroup_size(LANES)
fn forward(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let block = group.x + group.y * groups.x;
    let start = block * BLOCK;
    let end = min(start + BLOCK, uniforms.elements);
    var top = 0u;
    var factor = bitcast<f32>(exponent_of(0u) << 23u);
    var sum = 0.0;
    for (var i = start + 4u * lane; i < end; i += 4u * LANES) {
        let here = vec4<u32>(i, i + 1u, i + 2u, i + 3u) < vec4<u32>(uniforms.elements);
        let value = select(vec4<f32>(), gradient[i / 4u], here);
        let bits = bitcast<vec4<u32>>(value) & vec4<u32>(0x7fffffffu);
        let largest = max(max(bits.x, bits.y), max(bits.z, bits.w));
        if largest > top {
            sum = rescaled(sum, top, largest);
            top = largest;
            factor = bitcast<f32>(exponent_of(top) << 23u);
        }
        let scaled = value * factor;
        sum += dot(scaled, scaled);
    }
    tops[lane] = top;
    sums[lane] = sum;
    workgroupBarrier();
    for (var reach = LANES / 2u; reach > 0u; reach /= 2u) {
        if lane < reach {
            let largest = max(tops[lane], tops[lane + reach]);
            sums[lane] = rescaled(sums[lane], tops[lane], largest)
                + rescaled(sums[lane + reach], tops[lane + reach], largest);
            tops[lane] = largest;
        }
        workgroupBarrier();
    }
    if lane == 0u && start < uniforms.elements {
        partials[uniforms.first + block] = vec2<u32>(tops[0], bitcast<u32>(sums[0]));
    }
}
