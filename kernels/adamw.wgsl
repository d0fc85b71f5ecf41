// AdamW in one pass (Loshchilov & Hutter 2019; the order of torch.optim.AdamW).

struct Uniforms {
    elements: u32,
    first: u32, // element of gradient and parameter
    moment: u32, // and of the moments, where they begin
}

// What changes from step to step, rounded once from float64.
struct Values {
    gradient_scale: f32,
    beta1: f32,
    rest1: f32, // 1 - beta1
    beta2: f32,
    rest2: f32, // 1 - beta2
    rate: f32, // learning_rate sqrt(1 - beta2^count) / (1 - beta1^count)
    epsilon: f32, // epsilon sqrt(1 - beta2^count)
    decay: f32, // learning_rate weight_decay
    max_delta: f32,
}

@group(0) @binding(0) var<uniform> uniforms: Uniforms;
@group(0) @binding(1) var<storage, read> values: Values;
@group(0) @binding(2) var<storage, read> gradient: array<f32>;
@group(0) @binding(3) var<storage, read_write> parameter: array<f32>;
@group(0) @binding(4) var<storage, read_write> moment1: array<f32>;
@group(0) @binding(5) var<storage, read_write> moment2: array<f32>;

const LANES = 256u;

@compute @workgroup_size(LANES)
fn forward(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let start = (group.x + group.y * groups.x) * BLOCK;
    let end = min(start + BLOCK, uniforms.elements);
    for (var i = start + lane; i < end; i += LANES) {
        let at = uniforms.first + i;
        let moment = uniforms.moment + i;
        let g = gradient[at] * values.gradient_scale;
        let m = values.beta1 * moment1[moment] + values.rest1 * g;
        let v = values.beta2 * moment2[moment] + values.rest2 * g * g;
        let p = parameter[at];
        let delta = values.rate * m / (sqrt(v) + values.epsilon) + values.decay * p;
        moment1[moment] = m;
        moment2[moment] = v;
        parameter[at] = p - clamp(delta, -values.max_delta, values.max_delta);
    }
}
