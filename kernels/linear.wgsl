// C = scale A B + bias + residual for any (m, k), (k, n), in tiles of TILE_M x TILE_N: 8 x 8 (or 4 x 4) numbers a
// thread, in named registers. While a slice of DEPTH in k is multiplied out of one half of the workgroup's memory, the
// next one is loaded into registers and then put into the other half: one barrier a slice.
//
// A and B may lie along k (A: element (i, k) at i * stride + k; B: (k, j) at j * stride + k) or across it
// (A: k * stride + i; B: k * stride + j). In the workgroup's memory both lie across k, in rows of vec4. A thread loads
// blocks of 4 x 4 and turns those that lie along k. What lies past m or n is read from inside the array and never
// written; what lies past k is zero.
//
// Constants: TILE_M, TILE_N, DEPTH, ROWS4 and COLS4 (vec4 of rows and columns a thread holds), UNITS (blocks a thread
// loads of each slice), UNROLL (steps in k written out), LANES_N (threads of 32 beside each other in n), A_ALONG and
// B_ALONG (whether they lie along k), A_VEC, B_VEC, C_VEC (whether every vec4 is aligned), SCALE, BIAS, RESIDUAL, ADD
// (whether C is added to).

struct Uniforms {
    m: u32,
    n: u32,
    k: u32,
    split_k: u32, // of one workgroup, a multiple of DEPTH
    split_c: u32, // from one split's C to the next one's
    m_first: u32, // whether neighbouring workgroups are neighbours in m
    a_stride: u32,
    a_first: u32,
    b_stride: u32,
    b_first: u32,
    c_stride: u32,
    c_first: u32,
    residual_stride: u32,
    residual_first: u32,
    bias_first: u32,
    splits: u32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> u: Uniforms;

//: if A_VEC
@group(0) @binding(1) var<storage, read> a: array<vec4f>;
const A_UNIT = 4u;
//: else
@group(0) @binding(1) var<storage, read> a: array<f32>;
const A_UNIT = 1u;
//: end
//: if B_VEC
@group(0) @binding(2) var<storage, read> b: array<vec4f>;
const B_UNIT = 4u;
//: else
@group(0) @binding(2) var<storage, read> b: array<f32>;
const B_UNIT = 1u;
//: end
//: if C_VEC
@group(0) @binding(3) var<storage, read_write> c: array<vec4f>;
@group(0) @binding(4) var<storage, read> residual: array<vec4f>;
//: else
@group(0) @binding(3) var<storage, read_write> c: array<f32>;
@group(0) @binding(4) var<storage, read> residual: array<f32>;
//: end
//: if RESIDUAL
@group(0) @binding(5) var<storage, read> bias: array<f32>;
//: else
@group(0) @binding(4) var<storage, read> bias: array<f32>;
//: end

const A_ROW = TILE_M / 4u;
const B_ROW = TILE_N / 4u;
const THREADS_M = A_ROW / ROWS4;
const THREADS_N = B_ROW / COLS4;
const THREADS = THREADS_M * THREADS_N;
const LANES_M = 32u / LANES_N;
const BLOCKS_K = DEPTH / 4u;
const A_BLOCKS = A_ROW * BLOCKS_K;
const B_BLOCKS = B_ROW * BLOCKS_K;
const B_AT = DEPTH * A_ROW;
const STAGE = B_AT + DEPTH * B_ROW;

var<workgroup> tiles: array<vec4f, 2u * STAGE>;

// A block of 4 x 4 of a slice: where it goes in the workgroup's memory, and its first row (of m or n) and k.
struct Block {
    into: u32,
    row: u32,
    k: u32,
}

// Along k, 8 neighbouring threads take 8 blocks of rows and the next 8 the next k: whole sectors are read, and 8
// neighbouring vec4 of the workgroup's memory are written.
fn block_of(index: u32, row_blocks: u32, along: bool) -> Block {
    var row = index % row_blocks;
    var k = index / row_blocks;
    if (along) {
        row = index / (8u * BLOCKS_K) * 8u + index % 8u;
        k = index / 8u % BLOCKS_K;
    }
    return Block(k * 4u * row_blocks + row, row * 4u, k * 4u);
}

// The indices of a block's 4 vec4. row: its first, in the whole array; rows: of the whole array; k: its first.
fn start(first: u32, stride: u32, row: u32, rows: u32, k: u32, along: bool) -> vec4u {
    let last = rows - 1u;
    if (along) {
        return first + min(vec4u(row, row + 1u, row + 2u, row + 3u), vec4u(last)) * stride + k;
    }
    return first + vec4u(k, k + 1u, k + 2u, k + 3u) * stride + inside(row, last);
}

// The first row of a block, or of the last one in the array.
fn inside(row: u32, last: u32) -> u32 {
    return min(row, last / 4u * 4u);
}

// at: the indices of the block's vec4; k: its first; end: past the last k; spare: rows after the first in the array.
fn load_a(at: vec4u, k: u32, end: u32, spare: u32) -> mat4x4f {
    var block = mat4x4f();
//: for i in 0..4
//: if A_VEC
    if (k + select($iu, 0u, A_ALONG == 1u) < end) {
        block[$i] = a[at[$i]];
    }
//: else
//: for c in 0..4
    if (k + select($iu, $cu, A_ALONG == 1u) < end) {
        block[$i][$c] = a[at[$i] + select(min($cu, spare), $cu, A_ALONG == 1u)];
    }
//: end
//: end
//: end
    return block;
}

fn load_b(at: vec4u, k: u32, end: u32, spare: u32) -> mat4x4f {
    var block = mat4x4f();
//: for i in 0..4
//: if B_VEC
    if (k + select($iu, 0u, B_ALONG == 1u) < end) {
        block[$i] = b[at[$i]];
    }
//: else
//: for c in 0..4
    if (k + select($iu, $cu, B_ALONG == 1u) < end) {
        block[$i][$c] = b[at[$i] + select(min($cu, spare), $cu, B_ALONG == 1u)];
    }
//: end
//: end
//: end
    return block;
}

fn put(at: u32, row: u32, block: mat4x4f) {
//: for i in 0..4
    tiles[at + $iu * row] = block[$i];
//: end
}

// product: of 4 columns from `column` on.
fn store(row: u32, column: u32, split: u32, product: vec4f) {
//: if SCALE
    let value = u.scale * product;
//: else
    let value = product;
//: end
    let at = u.c_first + split * u.split_c + row * u.c_stride + column;
    let residual_at = u.residual_first + row * u.residual_stride + column;
//: if C_VEC
    if (column < u.n) {
        var sum = value;
//: if BIAS
        let bias_at = u.bias_first + column;
        sum += vec4f(bias[bias_at], bias[bias_at + 1u], bias[bias_at + 2u], bias[bias_at + 3u]);
//: end
//: if RESIDUAL
        sum += residual[residual_at / 4u];
//: end
//: if ADD
        sum += c[at / 4u];
//: end
        c[at / 4u] = sum;
    }
//: else
//: for i in 0..4
    if (column + $iu < u.n) {
        var sum = value[$i];
//: if BIAS
        sum += bias[u.bias_first + column + $iu];
//: end
//: if RESIDUAL
        sum += residual[residual_at + $iu];
//: end
//: if ADD
        sum += c[at + $iu];
//: end
        c[at + $iu] = sum;
    }
//: end
//: end
}

fn multiply(group: vec3u, groups: vec3u, lane: u32) {
    let tiles_m = (u.m + TILE_M - 1u) / TILE_M;
    let tiles_n = (u.n + TILE_N - 1u) / TILE_N;
    let tile = group.x + group.y * groups.x;
    if (tile >= tiles_m * tiles_n) {
        return;
    }
    let first_m = select(tile / tiles_n, tile % tiles_m, u.m_first == 1u) * TILE_M;
    let first_n = select(tile % tiles_n, tile / tiles_m, u.m_first == 1u) * TILE_N;
    let first_k = group.z * u.split_k;
    let end = min(u.k, first_k + u.split_k);
    let slices = (end - first_k + DEPTH - 1u) / DEPTH;

    // 32 neighbouring threads cover LANES_M x LANES_N of the THREADS_M x THREADS_N
    let m4 = lane / (LANES_M * THREADS_N) * LANES_M + lane / LANES_N % LANES_M;
    let n4 = lane / 32u % (THREADS_N / LANES_N) * LANES_N + lane % LANES_N;

    let a_step = DEPTH / A_UNIT * select(u.a_stride, 1u, A_ALONG == 1u);
    let b_step = DEPTH / B_UNIT * select(u.b_stride, 1u, B_ALONG == 1u);
//: for g in 0..UNITS
    let index$g = lane + $gu * THREADS;
    let of_a$g = index$g < A_BLOCKS;
    let of_b$g = !of_a$g && index$g < A_BLOCKS + B_BLOCKS;
    var into$g = 0u;
    var at$g = vec4u();
    var k$g = 0u;
    var spare$g = 0u;
    var step$g = 0u;
    var loaded$g = mat4x4f();
    if (of_a$g) {
        let block = block_of(index$g, A_ROW, A_ALONG == 1u);
        into$g = block.into;
        k$g = first_k + block.k;
        at$g = start(u.a_first, u.a_stride, first_m + block.row, u.m, k$g, A_ALONG == 1u) / A_UNIT;
        spare$g = u.m - 1u - inside(first_m + block.row, u.m - 1u);
        step$g = a_step;
        loaded$g = load_a(at$g, k$g, end, spare$g);
    } else if (of_b$g) {
        let block = block_of(index$g - A_BLOCKS, B_ROW, B_ALONG == 1u);
        into$g = B_AT + block.into;
        k$g = first_k + block.k;
        at$g = start(u.b_first, u.b_stride, first_n + block.row, u.n, k$g, B_ALONG == 1u) / B_UNIT;
        spare$g = u.n - 1u - inside(first_n + block.row, u.n - 1u);
        step$g = b_step;
        loaded$g = load_b(at$g, k$g, end, spare$g);
    }
//: end

//: for h in 0..ROWS4
//: for i in 0..4
//: for j in 0..COLS4
    var c$h$i$j = vec4f();
//: end
//: end
//: end

    for (var slice = 0u; slice < slices; slice++) {
        let stage = (slice & 1u) * STAGE;
//: for g in 0..UNITS
        if (of_a$g) {
//: if A_ALONG
            put(stage + into$g, A_ROW, transpose(loaded$g));
//: else
            put(stage + into$g, A_ROW, loaded$g);
//: end
        } else if (of_b$g) {
//: if B_ALONG
            put(stage + into$g, B_ROW, transpose(loaded$g));
//: else
            put(stage + into$g, B_ROW, loaded$g);
//: end
        }
//: end
        workgroupBarrier();
        if (slice + 1u < slices) {
//: for g in 0..UNITS
            at$g += step$g;
            k$g += DEPTH;
            if (of_a$g) {
                loaded$g = load_a(at$g, k$g, end, spare$g);
            } else if (of_b$g) {
                loaded$g = load_b(at$g, k$g, end, spare$g);
            }
//: end
        }
        for (var k = 0u; k < DEPTH; k += UNROLL) {
//: for k in 0..UNROLL
            {
                let a_at = stage + (k + $ku) * A_ROW + m4;
                let b_at = stage + B_AT + (k + $ku) * B_ROW + n4;
//: for h in 0..ROWS4
                let a$h = tiles[a_at + $hu * THREADS_M];
//: end
//: for j in 0..COLS4
                let b$j = tiles[b_at + $ju * THREADS_N];
//: end
//: for h in 0..ROWS4
//: for i in 0..4
//: for j in 0..COLS4
                c$h$i$j = fma(vec4f(a$h[$i]), b$j, c$h$i$j);
//: end
//: end
//: end
            }
//: end
        }
    }

//: for h in 0..ROWS4
//: for i in 0..4
    {
        let row = first_m + ($hu * THREADS_M + m4) * 4u + $iu;
        if (row < u.m) {
//: for j in 0..COLS4
            store(row, first_n + ($ju * THREADS_N + n4) * 4u, group.z, c$h$i$j);
//: end
        }
    }
//: end
//: end
}

@compute @workgroup_size(THREADS)
fn forward(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) lane: u32,
) {
    multiply(group, groups, lane);
}

@compute @workgroup_size(THREADS)
fn backward_x(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) lane: u32,
) {
    multiply(group, groups, lane);
}

@compute @workgroup_size(THREADS)
fn backward_weight(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) lane: u32,
) {
    multiply(group, groups, lane);
}

@group(0) @binding(1) var<storage, read> partials: array<f32>;
@group(0) @binding(2) var<storage, read_write> sums: array<f32>;
@group(0) @binding(3) var<storage, read> sums_residual: array<f32>;
//: if RESIDUAL
@group(0) @binding(4) var<storage, read> sums_bias: array<f32>;
//: else
@group(0) @binding(3) var<storage, read> sums_bias: array<f32>;
//: end

// C from the products of the splits of k, added in their order. partials: (splits, m, n)
@compute @workgroup_size(256)
fn sum_splits(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * 256u + lane;
    if (index >= u.m * u.n) {
        return;
    }
    let row = index / u.n;
    let column = index % u.n;
    var sum = partials[index];
    for (var split = 1u; split < u.splits; split++) {
        sum += partials[split * u.split_c + index];
    }
//: if SCALE
    sum *= u.scale;
//: end
//: if BIAS
    sum += sums_bias[u.bias_first + column];
//: end
//: if RESIDUAL
    sum += sums_residual[u.residual_first + row * u.residual_stride + column];
//: end
    let at = u.c_first + row * u.c_stride + column;
//: if ADD
    sum += sums[at];
//: end
    sums[at] = sum;
}

struct Sums {
    rows: u32,
    columns: u32,
    stride: u32,
    first: u32,
    rows_per_group: u32,
}

@group(0) @binding(0) var<uniform> s: Sums;

// The sum of each column over a group's rows, in their order; sums: (groups, columns). A thread takes a column.
@compute @workgroup_size(64)
fn column_sums(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
    let column = group.x * 64u + lane;
    if (column >= s.columns) {
        return;
    }
    let first = group.y * s.rows_per_group;
    let end = min(s.rows, first + s.rows_per_group);
    var sum = 0.0;
    for (var row = first; row < end; row++) {
        sum += partials[s.first + row * s.stride + column];
    }
    let at = group.y * s.columns + column;
//: if ADD
    sum += sums[at];
//: end
    sums[at] = sum;
}
