// Token embedding: a lookup forward, and backward a sum over the tokens of each distinct id, in the order of t.

// Element (id, column) of the table lies at row * row_stride + column * column_stride, so a table may lie across.
struct Uniforms {
    tokens: u32,
    columns: u32,
    vocab_size: u32,
    first: u32, // the rows first .. first + rows - 1 of the table are bound
    rows: u32,
    row_stride: u32,
    column_stride: u32,
}

@group(0) @binding(0) var<uniform> uniforms: Uniforms;

@group(0) @binding(1) var<storage, read> ids: array<u32>;
@group(0) @binding(2) var<storage, read> table: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

// A workgroup for each token.
@compute @workgroup_size(128)
fn forward(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let t = group.x + group.y * groups.x;
    if t >= uniforms.tokens {
        return;
    }
    let row = min(ids[t], uniforms.vocab_size - 1u) - uniforms.first; // wraps around below first
    if row < uniforms.rows {
        for (var c = lane; c < uniforms.columns; c += 128u) {
            out[t * uniforms.columns + c] = table[row * uniforms.row_stride + c * uniforms.column_stride];
        }
    }
}

@group(0) @binding(1) var<storage, read> dy: array<f32>;
@group(0) @binding(2) var<storage, read> order: array<u32>;
@group(0) @binding(3) var<storage, read> distinct: array<u32>;
@group(0) @binding(4) var<storage, read> starts: array<u32>;
@group(0) @binding(5) var<storage, read_write> dtable: array<f32>;

const COLUMNS = 32u;
const SLOTS = 8u;

var<workgroup> partials: array<f32, 256>;

// A workgroup for each distinct id and 32 columns; slot s takes the tokens s, s + 8, ... of the id's run.
@compute @workgroup_size(COLUMNS, SLOTS)
fn backward(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
) {
    let run = group.y + group.z * groups.y;
    let c = group.x * COLUMNS + local.x;
    let here = run < uniforms.tokens && c < uniforms.columns;
    var sum = 0.0;
    var row = 0xffffffffu;
    if here {
        row = distinct[run] - uniforms.first;
        if row < uniforms.rows {
            let end = starts[run + 1u];
            for (var i = starts[run] + local.y; i < end; i += SLOTS) {
                sum += dy[order[i] * uniforms.columns + c];
            }
        }
    }
    partials[local.y * COLUMNS + local.x] = sum;
    workgroupBarrier();
    if here && local.y == 0u && row < uniforms.rows {
        var total = 0.0;
        for (var slot = 0u; slot < SLOTS; slot++) {
            total += partials[slot * COLUMNS + local.x];
        }
        dtable[row * uniforms.row_stride + c * uniforms.column_stride] += total;
    }
}
