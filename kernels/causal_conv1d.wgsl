// Depthwise causal convolution with bias and SiLU: a thread slides over RUN steps of a channel.
//
// taps_w holds the weights of lags 4w to 4w + 3, window_w the inputs of these lags. A lag beyond the taps or beyond the
// document's start (position < lag) is taken out by selection, so that nothing passes, not even a NaN.

struct Uniforms {
    batch: u32,
    seq_len: u32,
    width: u32,
    runs: u32,
    biased: u32,
    carried: u32,
    x_stride: u32,
    x_first: u32,
    dx_stride: u32,
    dx_first: u32,
}

@group(0) @binding(0) var<uniform> uniforms: Uniforms;
@group(0) @binding(1) var<storage, read> positions: array<u32>;
@group(0) @binding(2) var<storage, read> x: array<f32>;
// the inputs before the row, (batch, D_CONV - 1, width), oldest first; bound and not read unless `carried`
@group(0) @binding(3) var<storage, read> held: array<f32>;
@group(0) @binding(4) var<storage, read> weight: array<f32>;
// bound and not read unless `biased`
@group(0) @binding(5) var<storage, read> bias: array<f32>;

fn tap(channel: u32, lag: u32) -> f32 {
    if lag < D_CONV {
        return weight[channel * D_CONV + (D_CONV - 1u - lag)];
    }
    return 0.0;
}

fn load_taps(channel: u32, lag: u32) -> vec4<f32> {
    return vec4(tap(channel, lag), tap(channel, lag + 1u), tap(channel, lag + 2u), tap(channel, lag + 3u));
}

fn load_bias(channel: u32) -> f32 {
    if uniforms.biased == 1u {
        return bias[channel];
    }
    return 0.0;
}

// x at step t, which may lie before the row (there from `held`) or after it (0).
fn input(batch: u32, channel: u32, t: i32) -> f32 {
    if t >= i32(uniforms.seq_len) {
        return 0.0;
    }
    if t >= 0 {
        return x[(batch * uniforms.seq_len + u32(t)) * uniforms.x_stride + uniforms.x_first + channel];
    }
    if uniforms.carried == 1u && t + i32(D_CONV) > 0 {
        return held[(batch * (D_CONV - 1u) + u32(t + i32(D_CONV) - 1)) * uniforms.width + channel];
    }
    return 0.0;
}

// 0 after the row.
fn position(batch: u32, t: i32) -> u32 {
    if t >= i32(uniforms.seq_len) {
        return 0u;
    }
    return positions[batch * uniforms.seq_len + u32(t)];
}

// The inputs of steps t, t - 1, t - 2 and t - 3.
fn load_window(batch: u32, channel: u32, t: i32) -> vec4<f32> {
    return vec4(
        input(batch, channel, t),
        input(batch, channel, t - 1),
        input(batch, channel, t - 2),
        input(batch, channel, t - 3),
    );
}

// Where a value of lags `lag` to `lag + 3` counts, 0 elsewhere.
fn counted(value: vec4<f32>, lag: u32, position: u32) -> vec4<f32> {
    let lags = vec4(lag) + vec4(0u, 1u, 2u, 3u);
    return select(vec4(0.0), value, (lags <= vec4(position)) & (lags < vec4(D_CONV)));
}

@group(0) @binding(6) var<storage, read_write> y: array<f32>;

// y = silu(bias + taps . window). Workgroups: (channels / 64, runs of all rows by 65,535, those left).
@compute @workgroup_size(64)
fn forward(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) i: u32) {
    let channel = group.x * 64u + i;
    let run = group.y + group.z * 65535u;
    if channel >= uniforms.width || run >= uniforms.batch * uniforms.runs {
        return;
    }
    let batch = run / uniforms.runs;
    let first = i32(run % uniforms.runs * RUN);
    let end = min(first + i32(RUN), i32(uniforms.seq_len));
    let offset = load_bias(channel);
//: for w in 0..WINDOWS
    let taps_$w = load_taps(channel, 4u * $wu);
    var window_$w = load_window(batch, channel, first - 1 - 4 * $w);
//: end
    for (var t = first; t < end; t += 4) {
//: for k in 0..4
        let x_$k = input(batch, channel, t + $k);
        let position_$k = position(batch, t + $k);
//: end
//: for k in 0..4
        {
            var moved = x_$k;
            var sum = offset;
//: for w in 0..WINDOWS
            let last_$w = window_$w.w;
            window_$w = vec4(moved, window_$w.xyz);
            moved = last_$w;
            sum += dot(taps_$w, counted(window_$w, 4u * $wu, position_$k));
//: end
            if t + $k < end {
                y[(batch * uniforms.seq_len + u32(t + $k)) * uniforms.width + channel] = silu(sum);
            }
        }
//: end
    }
}

@group(0) @binding(6) var<storage, read> dy: array<f32>;
@group(0) @binding(7) var<storage, read_write> dx: array<f32>;
@group(0) @binding(8) var<storage, read_write> partials_out: array<f32>;

// dx, and a run's sums of the gradients of taps and bias. Backwards in time, from the steps after the run whose gradients
// reach into it. The sum before SiLU is computed again.
@compute @workgroup_size(64)
fn backward(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) i: u32) {
    let channel = group.x * 64u + i;
    let run = group.y + group.z * 65535u;
    if channel >= uniforms.width || run >= uniforms.batch * uniforms.runs {
        return;
    }
    let batch = run / uniforms.runs;
    let first = i32(run % uniforms.runs * RUN);
    let end = first + i32(RUN);
    let reach = 4 * i32(WINDOWS);
    let offset = load_bias(channel);
    // pending_w: what dx of steps t - 4w to t - 4w - 3 has so far
//: for w in 0..WINDOWS
    let taps_$w = load_taps(channel, 4u * $wu);
    var window_$w = load_window(batch, channel, end + reach - 4 * $w);
    var pending_$w = vec4(0.0);
    var dtaps_$w = vec4(0.0);
//: end
    var dbias = 0.0;
    for (var top = end + reach - 1; top >= first; top -= 4) {
//: for k in 0..4
        let x_$k = input(batch, channel, top - $k - reach + 1);
        let position_$k = position(batch, top - $k);
        var dy_$k = 0.0;
        if top - $k < i32(uniforms.seq_len) {
            dy_$k = dy[(batch * uniforms.seq_len + u32(top - $k)) * uniforms.width + channel];
        }
//: end
//: for k in 0..4
        {
            let t = top - $k;
            var moved = x_$k;
            var sum = offset;
//: for w in WINDOWS..0
            let next_$w = window_$w.x;
            window_$w = vec4(window_$w.yzw, moved);
            moved = next_$w;
            let inputs_$w = counted(window_$w, 4u * $wu, position_$k);
            sum += dot(taps_$w, inputs_$w);
//: end
            let dsum = dy_$k * dsilu(sum);
            var dx_t = 0.0;
//: for w in WINDOWS..0
            pending_$w += counted(taps_$w * dsum, 4u * $wu, position_$k);
            let done_$w = pending_$w.x;
            pending_$w = vec4(pending_$w.yzw, dx_t);
            dx_t = done_$w;
//: end
            if t < end {
//: for w in 0..WINDOWS
                dtaps_$w += inputs_$w * dsum;
//: end
                dbias += dsum;
                if t < i32(uniforms.seq_len) {
                    let row = batch * uniforms.seq_len + u32(t);
                    dx[row * uniforms.dx_stride + uniforms.dx_first + channel] = dx_t;
                }
            }
        }
//: end
    }
    let base = run * (D_CONV + 1u) * uniforms.width + channel;
//: for w in 0..WINDOWS
//: for k in 0..4
    if 4u * $wu + $ku < D_CONV {
        partials_out[base + (D_CONV - 1u - (4u * $wu + $ku)) * uniforms.width] = dtaps_$w[$k];
    }
//: end
//: end
    partials_out[base + D_CONV * uniforms.width] = dbias;
}

struct SumUniforms {
    runs: u32,
    width: u32,
    // of weight and bias: 0 leaves, 1 writes, 2 adds
    weight: u32,
    bias: u32,
}

@group(0) @binding(0) var<uniform> sum_uniforms: SumUniforms;
@group(0) @binding(1) var<storage, read> partials: array<f32>;
@group(0) @binding(2) var<storage, read_write> dweight: array<f32>;
@group(0) @binding(3) var<storage, read_write> dbias_out: array<f32>;

const SLOTS = 8u;

var<workgroup> slots: array<f32, 32u * SLOTS>;

// dweight and dbias: the sum over runs. Workgroups: (channels / 32, taps and bias).
@compute @workgroup_size(32, SLOTS)
fn backward_sums(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let width = sum_uniforms.width;
    let channel = group.x * 32u + local.x;
    let end = select(0u, sum_uniforms.runs, channel < width);
    var sum = 0.0;
    for (var run = local.y; run < end; run += SLOTS) {
        sum += partials[(run * (D_CONV + 1u) + group.y) * width + channel];
    }
    slots[local.y * 32u + local.x] = sum;
    workgroupBarrier();
    if local.y != 0u || channel >= width {
        return;
    }
    var total = 0.0;
    for (var slot = 0u; slot < SLOTS; slot++) {
        total += slots[slot * 32u + local.x];
    }
    if group.y == D_CONV {
        if sum_uniforms.bias == 1u {
            dbias_out[channel] = total;
        } else if sum_uniforms.bias == 2u {
            dbias_out[channel] += total;
        }
    } else {
        let at = channel * D_CONV + group.y;
        if sum_uniforms.weight == 1u {
            dweight[at] = total;
        } else if sum_uniforms.weight == 2u {
            dweight[at] += total;
        }
    }
}

struct CarryUniforms {
    batch: u32,
    seq_len: u32,
    width: u32,
    x_stride: u32,
    x_first: u32,
}

@group(0) @binding(0) var<uniform> carry_uniforms: CarryUniforms;
@group(0) @binding(1) var<storage, read> carry_x: array<f32>;
@group(0) @binding(2) var<storage, read_write> state: array<f32>;
@group(0) @binding(3) var<storage, read_write> before: array<f32>;

// Keep the state in `before`, and leave the last D_CONV - 1 inputs in it. A thread a channel, oldest first, so that
// what a row shorter than the state moves forward is read before it is overwritten.
@compute @workgroup_size(64)
fn forward_carry(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) i: u32,
) {
    let index = (group.x + group.y * groups.x) * 64u + i;
    let batch = index / carry_uniforms.width;
    let channel = index % carry_uniforms.width;
    if batch >= carry_uniforms.batch {
        return;
    }
    let seq_len = carry_uniforms.seq_len;
    let base = batch * (D_CONV - 1u) * carry_uniforms.width + channel;
    for (var k = 0u; k + 1u < D_CONV; k++) {
        before[base + k * carry_uniforms.width] = state[base + k * carry_uniforms.width];
    }
    for (var k = 0u; k + 1u < D_CONV; k++) {
        // the input that lies D_CONV - 1 - k steps before the row's end
        let age = D_CONV - 1u - k;
        if age <= seq_len {
            let row = batch * seq_len + seq_len - age;
            state[base + k * carry_uniforms.width] =
                carry_x[row * carry_uniforms.x_stride + carry_uniforms.x_first + channel];
        } else {
            state[base + k * carry_uniforms.width] = before[base + (k + seq_len) * carry_uniforms.width];
        }
    }
}
