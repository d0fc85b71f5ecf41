// Selective scan: LANES lanes a channel with one vec4 of states each, CHANNELS channels a workgroup, all of time in turn.
//
// Time goes in blocks of BLOCK steps and these in runs of 4. Four lanes in a row are a team: each of them takes one
// step of a run, loads it a block ahead, takes its softplus and gate, and writes its results. With more than 16
// states a channel has several teams, which do the same steps for other states.
// The gradients of B and C are sums over channels: 8 of them are added across lanes, the rest of the workgroup through
// workgroup memory, and the workgroups by `backward_columns`, always in the same order.

struct Uniforms {
    seq_len: u32,
    d_inner: u32,
    blocks: u32,
    groups: u32,
    B_stride: u32,
    B_first: u32,
    C_stride: u32,
    C_first: u32,
    z_stride: u32,
    z_first: u32,
    dz_stride: u32,
    dz_first: u32,
}

@group(0) @binding(0) var<uniform> uniforms: Uniforms;
@group(0) @binding(1) var<storage, read> positions: array<u32>;
@group(0) @binding(2) var<storage, read> u: array<f32>;
@group(0) @binding(3) var<storage, read> delta: array<f32>;
@group(0) @binding(4) var<storage, read> B: array<f32>;
@group(0) @binding(5) var<storage, read> C: array<f32>;
@group(0) @binding(6) var<storage, read> z: array<f32>;
@group(0) @binding(7) var<storage, read> A_log: array<f32>;
@group(0) @binding(8) var<storage, read> D: array<f32>;
@group(0) @binding(9) var<storage, read> delta_bias: array<f32>;

const LN_2 = 0.6931471805599453;
const THREADS = CHANNELS * LANES;
// dB and dC of a step, padded to whole lanes
const VALUES = 8u * LANES;

// B and C of a block: (BLOCK, LANES). keep: 0 where the state is reset, else 1; four steps in a vec4.
var<workgroup> tile_B: array<vec4<f32>, BLOCK * LANES>;
var<workgroup> tile_C: array<vec4<f32>, BLOCK * LANES>;
var<workgroup> tile_keep: array<vec4<f32>, RUNS>;
//: if EXCHANGE
var<workgroup> box: array<vec4<f32>, THREADS>;

// The value of thread i ^ mask, through workgroup memory.
fn exchange(value: vec4<f32>, mask: u32, i: u32) -> vec4<f32> {
    box[i] = value;
    workgroupBarrier();
    let found = box[i ^ mask];
    workgroupBarrier();
    return found;
}
//: end

//: if SHUFFLE_TEAM
// The values of the team's four lanes.
fn team(value: f32, i: u32) -> vec4<f32> {
    return vec4(
        quadBroadcast(value, 0u),
        quadBroadcast(value, 1u),
        quadBroadcast(value, 2u),
        quadBroadcast(value, 3u),
    );
}

// The sum over the team of component i % 4.
fn team_sum(value: vec4<f32>, i: u32) -> f32 {
    let upper = (i & 2u) != 0u;
    let odd = (i & 1u) != 0u;
    let two = select(value.xy, value.zw, upper) + quadSwapY(select(value.zw, value.xy, upper));
    return select(two.x, two.y, odd) + quadSwapX(select(two.y, two.x, odd));
}

fn other_team(value: f32, mask: u32, i: u32) -> f32 {
    return subgroupShuffleXor(value, mask);
}
//: else
fn team(value: f32, i: u32) -> vec4<f32> {
    box[i].x = value;
    workgroupBarrier();
    let first = i & ~3u;
    let found = vec4(box[first].x, box[first + 1u].x, box[first + 2u].x, box[first + 3u].x);
    workgroupBarrier();
    return found;
}

fn team_sum(value: vec4<f32>, i: u32) -> f32 {
    box[i] = value;
    workgroupBarrier();
    let first = i & ~3u;
    let step = i & 3u;
    let sum = (box[first][step] + box[first + 1u][step]) + (box[first + 2u][step] + box[first + 3u][step]);
    workgroupBarrier();
    return sum;
}

fn other_team(value: f32, mask: u32, i: u32) -> f32 {
    return exchange(vec4(value, 0.0, 0.0, 0.0), mask, i).x;
}
//: end

// The sum over all lanes of a channel of component i % 4.
fn lane_sum(value: vec4<f32>, i: u32) -> f32 {
    var sum = team_sum(value, i);
    if LANES > 4u {
        sum += other_team(sum, 4u, i);
    }
    if LANES > 8u {
        sum += other_team(sum, 8u, i);
    }
    if LANES > 16u {
        sum += other_team(sum, 16u, i);
    }
    if LANES > 32u {
        sum += other_team(sum, 32u, i);
    }
    if LANES > 64u {
        sum += other_team(sum, 64u, i);
    }
    return sum;
}

// The value of the same lane of a channel 1, 2 or 4 away.
fn channel_0(value: vec4<f32>, i: u32) -> vec4<f32> {
//: if SHUFFLE_CHANNEL_0
    return subgroupShuffleXor(value, 1u * LANES);
//: else
    return exchange(value, 1u * LANES, i);
//: end
}

fn channel_1(value: vec4<f32>, i: u32) -> vec4<f32> {
//: if SHUFFLE_CHANNEL_1
    return subgroupShuffleXor(value, 2u * LANES);
//: else
    return exchange(value, 2u * LANES, i);
//: end
}

fn channel_2(value: vec4<f32>, i: u32) -> vec4<f32> {
//: if SHUFFLE_CHANNEL_2
    return subgroupShuffleXor(value, 4u * LANES);
//: else
    return exchange(value, 4u * LANES, i);
//: end
}

fn state_B(row: u32, n: u32) -> f32 {
    if n < D_STATE {
        return B[row * uniforms.B_stride + uniforms.B_first + n];
    }
    return 0.0;
}

fn state_C(row: u32, n: u32) -> f32 {
    if n < D_STATE {
        return C[row * uniforms.C_stride + uniforms.C_first + n];
    }
    return 0.0;
}

// One lane's states of B (places 0 .. BLOCK - 1) or C (the next BLOCK) in a block; 0 past the end of time.
fn load_tile(batch: u32, block: u32, place: u32, n: u32) -> vec4<f32> {
    let t = block * BLOCK + place % BLOCK;
    if t >= uniforms.seq_len || place >= 2u * BLOCK {
        return vec4(0.0);
    }
    let row = batch * uniforms.seq_len + t;
    if place < BLOCK {
        return vec4(state_B(row, n), state_B(row, n + 1u), state_B(row, n + 2u), state_B(row, n + 3u));
    }
    return vec4(state_C(row, n), state_C(row, n + 1u), state_C(row, n + 2u), state_C(row, n + 3u));
}

fn store_tile(value: vec4<f32>, place: u32, lane: u32) {
    if place < BLOCK {
        tile_B[place * LANES + lane] = value;
    } else if place < 2u * BLOCK {
        tile_C[(place - BLOCK) * LANES + lane] = value;
    }
}

fn keeps(batch: u32, t: u32) -> f32 {
    if t < uniforms.seq_len && positions[batch * uniforms.seq_len + t] == 0u {
        return 0.0;
    }
    return 1.0;
}

// keep of the four steps of a run, on the threads that have one.
fn load_keep(batch: u32, block: u32, run: u32) -> vec4<f32> {
    if run >= RUNS {
        return vec4(1.0);
    }
    let t = block * BLOCK + 4u * run;
    return vec4(keeps(batch, t), keeps(batch, t + 1u), keeps(batch, t + 2u), keeps(batch, t + 3u));
}

fn store_keep(value: vec4<f32>, run: u32) {
    if run < RUNS {
        tile_keep[run] = value;
    }
}

fn rate(channel: u32, n: u32) -> f32 {
    if n < D_STATE {
        return -safe_exp(A_log[channel * D_STATE + n]) / LN_2;
    }
    return 0.0;
}

// A / ln 2, so that a = 2^(dt rates); 0 for states past the last.
fn load_rates(channel: u32, n: u32) -> vec4<f32> {
    return vec4(rate(channel, n), rate(channel, n + 1u), rate(channel, n + 2u), rate(channel, n + 3u));
}

// a = exp(dt A), 0 where the state is reset.
fn decay(dt: f32, rates: vec4<f32>, keep: f32) -> vec4<f32> {
    return exp2(max(dt * rates, vec4(-126.0))) * keep;
}

fn exists(channel: u32, t: u32) -> bool {
    return channel < uniforms.d_inner && t < uniforms.seq_len;
}

// u, delta and z of one step; 0 where there is none.
fn load_step(batch: u32, channel: u32, t: u32) -> vec3<f32> {
    if !exists(channel, t) {
        return vec3(0.0);
    }
    let row = batch * uniforms.seq_len + t;
    let at = row * uniforms.d_inner + channel;
    return vec3(u[at], delta[at], z[row * uniforms.z_stride + uniforms.z_first + channel]);
}

// softplus(raw), and 0 where there is no step: so the state stays.
fn step_size(channel: u32, t: u32, raw: f32) -> f32 {
    return select(0.0, softplus(raw), exists(channel, t));
}

@group(0) @binding(10) var<storage, read_write> y: array<f32>;
@group(0) @binding(11) var<storage, read_write> starts_out: array<vec4<f32>>;
//: if CARRIED
@group(0) @binding(12) var<storage, read_write> state: array<f32>;

fn state_at(batch: u32, channel: u32, n: u32) -> u32 {
    return (batch * D_STATE + n) * uniforms.d_inner + channel;
}
//: end

// y, and the state before each block. Workgroups: (channel groups, batch).
@compute @workgroup_size(THREADS)
fn forward(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) i: u32) {
    let lane = i % LANES;
    let slot = i / LANES;
    let batch = group.y;
    let channel = group.x * CHANNELS + slot;
    let inside = channel < uniforms.d_inner;
    let parameter = min(channel, uniforms.d_inner - 1u);
    let rates = load_rates(parameter, 4u * lane);
    let skip = D[parameter];
    let bias = delta_bias[parameter];
    var h = vec4(0.0);
//: if CARRIED
//: for n in 0..4
    if inside && 4u * lane + $nu < D_STATE {
        h[$n] = state[state_at(batch, channel, 4u * lane + $nu)];
    }
//: end
//: end
//: for q in 0..QUADS
    var tile_$q = load_tile(batch, 0u, slot + $qu * CHANNELS, 4u * lane);
//: end
    var keep = load_keep(batch, 0u, i);
//: for r in 0..RUNS_AHEAD
    var next_$r = load_step(batch, channel, $ru * 4u + i % 4u);
//: end
    for (var block = 0u; block < uniforms.blocks; block++) {
        workgroupBarrier();
//: for q in 0..QUADS
        store_tile(tile_$q, slot + $qu * CHANNELS, lane);
        tile_$q = load_tile(batch, block + 1u, slot + $qu * CHANNELS, 4u * lane);
//: end
        store_keep(keep, i);
        keep = load_keep(batch, block + 1u, i);
        starts_out[((batch * uniforms.groups + group.x) * uniforms.blocks + block) * THREADS + i] = h;
        workgroupBarrier();
//: for r in 0..RUNS
        {
            let t = block * BLOCK + $ru * 4u + i % 4u;
//: if FAR
            let now = next_$r;
            next_$r = load_step(batch, channel, t + BLOCK);
//: else
            let now = next_0;
            next_0 = load_step(batch, channel, t + 4u);
//: end
            let dt = step_size(channel, t, now.y + bias);
            let dts = team(dt, i);
            let inputs = team(dt * now.x, i);
            var outs: vec4<f32>;
//: for k in 0..4
            h = decay(dts[$k], rates, tile_keep[$ru][$k]) * h
                + inputs[$k] * tile_B[($ru * 4u + $ku) * LANES + lane];
            outs[$k] = dot(tile_C[($ru * 4u + $ku) * LANES + lane], h);
//: end
            let out = lane_sum(outs, i);
            if lane < 4u && exists(channel, t) {
                y[(batch * uniforms.seq_len + t) * uniforms.d_inner + channel] = (out + skip * now.x) * silu(now.z);
            }
        }
//: end
    }
//: if CARRIED
//: for n in 0..4
    if inside && 4u * lane + $nu < D_STATE {
        state[state_at(batch, channel, 4u * lane + $nu)] = h[$n];
    }
//: end
//: end
}

@group(0) @binding(10) var<storage, read> dy: array<f32>;
@group(0) @binding(11) var<storage, read> starts: array<vec4<f32>>;
@group(0) @binding(12) var<storage, read_write> du: array<f32>;
@group(0) @binding(13) var<storage, read_write> ddelta: array<f32>;
@group(0) @binding(14) var<storage, read_write> dz: array<f32>;
@group(0) @binding(15) var<storage, read_write> partial_columns_out: array<vec4<f32>>;
@group(0) @binding(16) var<storage, read_write> partial_parameters_out: array<f32>;

// dB and dC of a block, four steps in a vec4: (RUNS, CHANNELS / 8, VALUES).
var<workgroup> sums: array<vec4<f32>, RUNS * (CHANNELS / 8u) * VALUES>;

// u, delta, z and dy of one step; 0 where there is none.
fn load_back(batch: u32, channel: u32, t: u32) -> vec4<f32> {
    if !exists(channel, t) {
        return vec4(0.0);
    }
    let at = (batch * uniforms.seq_len + t) * uniforms.d_inner + channel;
    return vec4(load_step(batch, channel, t), dy[at]);
}

// du, ddelta, dz, and partial sums of the rest. A block is computed again from the state before it, keeping the state
// before each run; then each run from the last, keeping its four steps. With dout_t = dy_t silu(z_t):
// dh_t = C_t dout_t + a_{t+1} dh_{t+1},  g_t = a_t dh_t h_{t-1} = d log a_t,
// dB_t = sum over channels of dh_t dt_t u_t,  dC_t = the same of h_t dout_t,  dA += g_t dt_t,
// du_t = D dout_t + dt_t B_t . dh_t,  ddt_t = u_t B_t . dh_t + A . g_t.
@compute @workgroup_size(THREADS)
fn backward(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) i: u32) {
    let lane = i % LANES;
    let slot = i / LANES;
    let batch = group.y;
    let channel = group.x * CHANNELS + slot;
    let parameter = min(channel, uniforms.d_inner - 1u);
    let rates = load_rates(parameter, 4u * lane);
    let skip = D[parameter];
    let bias = delta_bias[parameter];
    let place = (batch * uniforms.groups + group.x) * uniforms.blocks;
    let odd_0 = (slot & 1u) != 0u;
    let odd_1 = (slot & 2u) != 0u;
    let odd_2 = (slot & 4u) != 0u;
    let value = u32(odd_0) * 4u * LANES + 4u * lane + 2u * u32(odd_1) + u32(odd_2);
    var later = vec4(0.0);
    var dA = vec4(0.0);
    var dD = 0.0;
    var dbias = 0.0;
    let last = uniforms.blocks - 1u;
//: for q in 0..QUADS
    var tile_$q = load_tile(batch, last, slot + $qu * CHANNELS, 4u * lane);
//: end
    var keep = load_keep(batch, last, i);
//: for r in 0..RUNS
    var next_$r = load_back(batch, channel, last * BLOCK + $ru * 4u + i % 4u);
//: end
    var next_start = starts[(place + last) * THREADS + i];
    for (var done = 0u; done < uniforms.blocks; done++) {
        let block = last - done;
        let before = max(block, 1u) - 1u;
        workgroupBarrier();
//: for q in 0..QUADS
        store_tile(tile_$q, slot + $qu * CHANNELS, lane);
        tile_$q = load_tile(batch, before, slot + $qu * CHANNELS, 4u * lane);
//: end
        store_keep(keep, i);
        keep = load_keep(batch, before, i);
        workgroupBarrier();
        var h = next_start;
        next_start = starts[(place + before) * THREADS + i];
//: for r in 0..RUNS
        let now_$r = next_$r;
        next_$r = load_back(batch, channel, before * BLOCK + $ru * 4u + i % 4u);
        let dt_$r = step_size(channel, block * BLOCK + $ru * 4u + i % 4u, now_$r.y + bias);
        let start_$r = h;
        if $ru + 1u < RUNS {
            let dts = team(dt_$r, i);
            let inputs = team(dt_$r * now_$r.x, i);
//: for k in 0..4
            h = decay(dts[$k], rates, tile_keep[$ru][$k]) * h
                + inputs[$k] * tile_B[($ru * 4u + $ku) * LANES + lane];
//: end
        }
//: end
//: for s in COPIES..0
//: if UNROLL
        {
            let run = $su;
//: else
        for (var left = RUNS; left > 0u; left--) {
            let run = left - 1u;
//: end
            let t = block * BLOCK + run * 4u + i % 4u;
            var now = now_0;
            var dt = dt_0;
            h = start_0;
//: for r in 1..RUNS
            now = select(now, now_$r, run == $ru);
            dt = select(dt, dt_$r, run == $ru);
            h = select(h, start_$r, run == $ru);
//: end
            let gate = sigmoid(now.z);
            let dout = now.w * now.z * gate;
            let dts = team(dt, i);
            let inputs = team(dt * now.x, i);
            let douts = team(dout, i);
            let keeps_of_run = tile_keep[run];
            var outs: vec4<f32>;
//: for k in 0..4
            let B_$k = tile_B[(run * 4u + $ku) * LANES + lane];
            let C_$k = tile_C[(run * 4u + $ku) * LANES + lane];
            let a_$k = decay(dts[$k], rates, keeps_of_run[$k]);
            let before_$k = h;
            h = a_$k * h + inputs[$k] * B_$k;
            let h_$k = h;
            outs[$k] = dot(C_$k, h);
//: end
            var through_B: vec4<f32>;
            var through_a: vec4<f32>;
//: for k in 4..0
            let dh_$k = C_$k * douts[$k] + later;
            later = a_$k * dh_$k;
            let g_$k = later * before_$k;
            dA += g_$k * dts[$k];
            through_B[$k] = dot(B_$k, dh_$k);
            through_a[$k] = dot(rates, g_$k);
            let dB_$k = dh_$k * inputs[$k];
            let dC_$k = h_$k * douts[$k];
            let pair_$k = select(dB_$k, dC_$k, odd_0) + channel_0(select(dC_$k, dB_$k, odd_0), i);
//: end
            let half_0 = vec4(select(pair_0.xy, pair_0.zw, odd_1), select(pair_1.xy, pair_1.zw, odd_1))
                + channel_1(vec4(select(pair_0.zw, pair_0.xy, odd_1), select(pair_1.zw, pair_1.xy, odd_1)), i);
            let half_1 = vec4(select(pair_2.xy, pair_2.zw, odd_1), select(pair_3.xy, pair_3.zw, odd_1))
                + channel_1(vec4(select(pair_2.zw, pair_2.xy, odd_1), select(pair_3.zw, pair_3.xy, odd_1)), i);
            let even = vec4(half_0.xz, half_1.xz);
            let odd = vec4(half_0.yw, half_1.yw);
            sums[(run * (CHANNELS / 8u) + slot / 8u) * VALUES + value] =
                select(even, odd, odd_2) + channel_2(select(odd, even, odd_2), i);

            let out = lane_sum(outs, i) + skip * now.x;
            let dx = lane_sum(through_B, i);
            let ddt = dx * now.x + lane_sum(through_a, i) * LN_2;
            let draw = ddt * sigmoid(now.y + bias);
            if exists(channel, t) {
                dD += dout * now.x;
                dbias += draw;
                if lane < 4u {
                    let row = batch * uniforms.seq_len + t;
                    let at = row * uniforms.d_inner + channel;
                    du[at] = skip * dout + dt * dx;
                    ddelta[at] = draw;
                    dz[row * uniforms.dz_stride + uniforms.dz_first + channel] =
                        out * now.w * gate * (1.0 + now.z * (1.0 - gate));
                }
            }
        }
//: end
        workgroupBarrier();
        for (var v = i; v < RUNS * VALUES; v += THREADS) {
            let run = v / VALUES;
            var sum = sums[run * (CHANNELS / 8u) * VALUES + v % VALUES];
            for (var s = 1u; s < CHANNELS / 8u; s++) {
                sum += sums[(run * (CHANNELS / 8u) + s) * VALUES + v % VALUES];
            }
            partial_columns_out[((place + block) * RUNS + run) * VALUES + v % VALUES] = sum;
        }
    }
    let D_all = team(dD, i);
    let bias_all = team(dbias, i);
    if channel < uniforms.d_inner {
        let base = batch * uniforms.d_inner * (D_STATE + 2u);
        let dA_log = dA * rates * LN_2;
//: for n in 0..4
        if 4u * lane + $nu < D_STATE {
            partial_parameters_out[base + channel * D_STATE + 4u * lane + $nu] = dA_log[$n];
        }
//: end
        if lane == 0u {
            let tail = base + uniforms.d_inner * D_STATE + channel;
            partial_parameters_out[tail] = (D_all.x + D_all.y) + (D_all.z + D_all.w);
            partial_parameters_out[tail + uniforms.d_inner] = (bias_all.x + bias_all.y) + (bias_all.z + bias_all.w);
        }
    }
}

struct ColumnUniforms {
    batch: u32,
    seq_len: u32,
    groups: u32,
    runs: u32,
    // which of dB (1) and dC (2) lie in `columns`
    which: u32,
    B_stride: u32,
    B_first: u32,
    C_stride: u32,
    C_first: u32,
}

@group(0) @binding(0) var<uniform> column_uniforms: ColumnUniforms;
@group(0) @binding(1) var<storage, read> partial_columns: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> columns: array<f32>;

// dB and dC: the sum over channel groups, for four steps of one state a thread.
@compute @workgroup_size(64)
fn backward_columns(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) i: u32,
) {
    let size = column_uniforms.runs * VALUES;
    let index = (group.x + group.y * groups.x) * 64u + i;
    let batch = index / size;
    let value = index % VALUES;
    let n = value % (4u * LANES);
    let is_C = value >= 4u * LANES;
    if batch >= column_uniforms.batch || n >= D_STATE || (column_uniforms.which & (1u + u32(is_C))) == 0u {
        return;
    }
    let first = batch * column_uniforms.groups * size + index % size;
    var even = vec4(0.0);
    var odd = vec4(0.0);
    var g = 0u;
    for (; g + 4u <= column_uniforms.groups; g += 4u) {
        let at = first + g * size;
        even += partial_columns[at] + partial_columns[at + 2u * size];
        odd += partial_columns[at + size] + partial_columns[at + 3u * size];
    }
    for (; g < column_uniforms.groups; g++) {
        even += partial_columns[first + g * size];
    }
    let sum = even + odd;
    let stride = select(column_uniforms.B_stride, column_uniforms.C_stride, is_C);
    let column = select(column_uniforms.B_first, column_uniforms.C_first, is_C) + n;
    let t = index % size / VALUES * 4u;
//: for k in 0..4
    if t + $ku < column_uniforms.seq_len {
        columns[(batch * column_uniforms.seq_len + t + $ku) * stride + column] = sum[$k];
    }
//: end
}

struct ParameterUniforms {
    batch: u32,
    d_inner: u32,
    // of A_log, D and delta_bias: 0 leaves, 1 writes, 2 adds
    A_log: u32,
    D: u32,
    delta_bias: u32,
}

@group(0) @binding(0) var<uniform> parameter_uniforms: ParameterUniforms;
@group(0) @binding(1) var<storage, read> partial_parameters: array<f32>;
@group(0) @binding(2) var<storage, read_write> dA_log: array<f32>;
@group(0) @binding(3) var<storage, read_write> dD: array<f32>;
@group(0) @binding(4) var<storage, read_write> ddelta_bias: array<f32>;

// dA_log, dD and ddelta_bias: the sum over the batch, one element a thread.
@compute @workgroup_size(64)
fn backward_parameters(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) i: u32,
) {
    let d_inner = parameter_uniforms.d_inner;
    let size = d_inner * (D_STATE + 2u);
    let index = (group.x + group.y * groups.x) * 64u + i;
    if index >= size {
        return;
    }
    var sum = 0.0;
    for (var b = 0u; b < parameter_uniforms.batch; b++) {
        sum += partial_parameters[b * size + index];
    }
    if index < d_inner * D_STATE {
        if parameter_uniforms.A_log == 1u {
            dA_log[index] = sum;
        } else if parameter_uniforms.A_log == 2u {
            dA_log[index] += sum;
        }
    } else if index < d_inner * (D_STATE + 1u) {
        let channel = index - d_inner * D_STATE;
        if parameter_uniforms.D == 1u {
            dD[channel] = sum;
        } else if parameter_uniforms.D == 2u {
            dD[channel] += sum;
        }
    } else {
        let channel = index - d_inner * (D_STATE + 1u);
        if parameter_uniforms.delta_bias == 1u {
            ddelta_bias[channel] = sum;
        } else if parameter_uniforms.delta_bias == 2u {
            ddelta_bias[channel] += sum;
        }
    }
}
