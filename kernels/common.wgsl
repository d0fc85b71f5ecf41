// Functions that several kernels share. The arguments of exp are clamped: e^88 is the last below float32's largest.

fn safe_exp(x: f32) -> f32 {
    return exp(clamp(x, -87.0, 88.0));
}

fn sigmoid(x: f32) -> f32 {
    return 1.0 / (1.0 + safe_exp(-x));
}

fn silu(x: f32) -> f32 {
    return x * sigmoid(x);
}

// d silu(x) / dx
fn dsilu(x: f32) -> f32 {
    let s = sigmoid(x);
    return s * (1.0 + x * (1.0 - s));
}

// log(1 + e^x). 1 + e is rounded and log may be off by 2^-21 near 1, so small e takes the series.
fn softplus(x: f32) -> f32 {
    let e = safe_exp(x);
    let series = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * (0.25 - e * 0.2))));
    return select(select(log(1.0 + e), series, e < 0.05), x, x > 20.0);
}
