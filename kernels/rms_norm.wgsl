// RMSNorm: a workgroup for each row; the weight's gradient by tiles of rows, then over the tiles, in a fixed order.

struct Uniforms {
    rows: u32,
    d_model: u32,
    epsilon: f32,
    add: u32,
}

@group(0) @binding(0) var<uniform> uniforms: Uniforms;

const LANES = 128u;

var<workgroup> sums: array<f32, 128>;

// The sum over the workgroup, on every lane.
fn sum_of(value: f32, lane: u32) -> f32 {
    sums[lane] = value;
    workgroupBarrier();
    for (var reach = LANES / 2u; reach > 0u; reach /= 2u) {
        if lane < reach {
            sums[lane] += sums[lane + reach];
        }
        workgroupBarrier();
    }
    return sums[0];
}

@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;
@group(0) @binding(4) var<storage, read_write> scale_out: array<f32>;

// y = x s weight, s = 1 / sqrt(mean(x^2) + epsilon).
@compute @workgroup_size(LANES)
fn forward(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.x + group.y * groups.x;
    let here = row < uniforms.rows;
    let width = select(0u, uniforms.d_model, here);
    let start = row * uniforms.d_model;
    var square = 0.0;
    for (var c = lane; c < width; c += LANES) {
        let value = x[start + c];
        square += value * value;
    }
    let s = 1.0 / sqrt(sum_of(square, lane) / f32(uniforms.d_model) + uniforms.epsilon);
    for (var c = lane; c < width; c += LANES) {
        y[start + c] = x[start + c] * s * weight[c];
    }
    if here && lane == 0u {
        scale_out[row] = s;
    }
}

@group(0) @binding(1) var<storage, read> dy: array<f32>;
@group(0) @binding(2) var<storage, read> inputs: array<f32>;
@group(0) @binding(3) var<storage, read> scale: array<f32>;
@group(0) @binding(4) var<storage, read> gain: array<f32>;
@group(0) @binding(5) var<storage, read_write> dx: array<f32>;

// dx = s (dy weight - x s^2 mean(dy weight x)), written or added.
@compute @workgroup_size(LANES)
fn backward(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.x + group.y * groups.x;
    let width = select(0u, uniforms.d_model, row < uniforms.rows);
    let start = row * uniforms.d_model;
    var product = 0.0;
    for (var c = lane; c < width; c += LANES) {
        product += dy[start + c] * gain[c] * inputs[start + c];
    }
    let mean = sum_of(product, lane) / f32(uniforms.d_model);
    let s = scale[min(row, uniforms.rows - 1u)];
    for (var c = lane; c < width; c += LANES) {
        let value = s * (dy[start + c] * gain[c] - inputs[start + c] * s * (s * mean));
        if uniforms.add == 1u {
            dx[start + c] += value;
        } else {
            dx[start + c] = value;
        }
    }
}

const COLUMNS = 32u;
const SLOTS = 8u;

var<workgroup> slots: array<f32, 256>;

// The sum over the slots of a column, on slot 0.
fn sum_of_slots(value: f32, local: vec3<u32>) -> f32 {
    slots[local.y * COLUMNS + local.x] = value;
    workgroupBarrier();
    var total = 0.0;
    if local.y == 0u {
        for (var slot = 0u; slot < SLOTS; slot++) {
            total += slots[slot * COLUMNS + local.x];
        }
    }
    return total;
}

@group(0) @binding(4) var<storage, read_write> partials_out: array<f32>;

// partials[tile, c] = sum of dy x s over TILE rows.
@compute @workgroup_size(COLUMNS, SLOTS)
fn backward_weight(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
) {
    let tile = group.y + group.z * groups.y;
    let c = group.x * COLUMNS + local.x;
    let here = c < uniforms.d_model && tile * TILE < uniforms.rows;
    let end = select(0u, min((tile + 1u) * TILE, uniforms.rows), here);
    var sum = 0.0;
    for (var row = tile * TILE + local.y; row < end; row += SLOTS) {
        let i = row * uniforms.d_model + c;
        sum += dy[i] * inputs[i] * scale[row];
    }
    let total = sum_of_slots(sum, local);
    if here && local.y == 0u {
        partials_out[tile * uniforms.d_model + c] = total;
    }
}

@group(0) @binding(1) var<storage, read> partials: array<f32>;
@group(0) @binding(2) var<storage, read_write> dweight: array<f32>;

// dweight[c] = the sum of partials[tile, c] over `rows` tiles, written or added.
@compute @workgroup_size(COLUMNS, SLOTS)
fn backward_sum(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let c = group.x * COLUMNS + local.x;
    let end = select(0u, uniforms.rows, c < uniforms.d_model);
    var sum = 0.0;
    for (var tile = local.y; tile < end; tile += SLOTS) {
        sum += partials[tile * uniforms.d_model + c];
    }
    let total = sum_of_slots(sum, local);
    if local.y == 0u && c < uniforms.d_model {
        if uniforms.add == 1u {
            dweight[c] += total;
        } else {
            dweight[c] = total;
        }
    }
}
