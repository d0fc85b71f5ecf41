// Dropout of a low-rank adapter's input. Which elements are dropped is a hash of integers (`mamba_ops/dropout.py`), so
// the backward computes the mask again. A thread for each element; the products are linear's.

struct Uniforms {
    rows: u32,
    columns: u32,
    stride: u32, // of the operand that may be a range of columns: x forward, out backward
    first: u32,
    threshold: u32, // a hash below it drops its element
    factor: f32, // of what stays, 1 / (1 - rate)
}

// What changes from step to step, or from batch to batch.
struct Mask {
    key0: u32,
    key1: u32,
    first: u32, // tokens of the optimizer step before these rows
}

@group(0) @binding(0) var<uniform> uniforms: Uniforms;
@group(0) @binding(1) var<storage, read> mask: Mask;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

const GOLDEN = 0x9e3779b9u;

// lowbias32, C. Wellons.
fn mix(x: u32) -> u32 {
    var h = (x ^ (x >> 16u)) * 0x7feb352du;
    h = (h ^ (h >> 15u)) * 0x846ca68bu;
    return h ^ (h >> 16u);
}

fn drop(value: f32, row: u32, column: u32) -> f32 {
    let h = mix((mix(mask.key0 ^ (mask.first + row)) + mask.key1) ^ (column * GOLDEN));
    return select(uniforms.factor * value, 0.0, h < uniforms.threshold);
}

// out = drop(x). x: rows of `stride`; out: (rows, columns)
@compute @workgroup_size(LANES)
fn forward(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * LANES + lane;
    if index >= uniforms.rows * uniforms.columns {
        return;
    }
    let row = index / uniforms.columns;
    let column = index % uniforms.columns;
    out[index] = drop(x[uniforms.first + row * uniforms.stride + column], row, column);
}

// out += drop(x). x: (rows, columns); out: rows of `stride`
@compute @workgroup_size(LANES)
fn backward(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = (group.x + group.y * groups.x) * LANES + lane;
    if index >= uniforms.rows * uniforms.columns {
        return;
    }
    let row = index / uniforms.columns;
    let column = index % uniforms.columns;
    out[uniforms.first + row * uniforms.stride + column] += drop(x[index], row, column);
}
