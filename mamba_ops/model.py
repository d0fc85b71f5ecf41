"""The Mamba-1 language model, forward and backward, written once against `ops.Ops` (Gu & Dao 2023)."""

from typing import Any, NamedTuple

import numpy as np

from mamba_ops.config import MambaConfig
from mamba_ops.low_rank import DenseGradients, with_dense
from mamba_ops.ops import NO_ADAPTERS, Adapters, Array, Columns, Gradients, LayerState, Need, Ops, Parameters, Rows
from mamba_ops.parameters import EMBEDDING, FINAL_NORM, head_name, layer_prefix


class LayerSaved(NamedTuple):
    """What a layer keeps for its backward.

    y: (T, d_model), the normed input. xz: (T, 2 d_inner). u, gated: (T, d_inner), the scan's input and output.
    x_dbl: (T, dt_rank + 2 d_state), the columns dt, B and C.
    """

    norm: Any
    y: Array
    xz: Array
    conv: Any
    u: Array
    x_dbl: Array
    scan: Any
    gated: Array


def empty_state(ops: Ops, config: MambaConfig, batch: int) -> list[LayerState]:
    """Return the zero state of every layer."""
    shape = config.d_inner, config.state_size, config.conv_kernel
    return [ops.layer_state(batch, *shape) for _ in range(config.num_hidden_layers)]


def losses(
    ops: Ops,
    params: Parameters,
    config: MambaConfig,
    rows: Rows,
    state: list[LayerState] | None = None,
    adapters: Adapters = NO_ADAPTERS,
) -> Array:
    """Return the negative log-likelihood of each target in nats, 0 where ignored: (batch * seq_len,).

    A state is read as what lies before the rows, and left as what lies after them. The result lives as long
    as the caller's scope.
    """
    head = head_name(config)
    x = _final_hidden(ops, with_dense(ops, params, adapters), config, rows, state, adapters)
    return ops.linear_cross_entropy_forward(rows, x, params, head, adapter=adapters.get(head))


def logits(
    ops: Ops, params: Parameters, config: MambaConfig, rows: Rows, state: list[LayerState] | None = None
) -> np.ndarray:
    """Return the logits on the host: (batch * seq_len, vocab_size); the state as in `losses`."""
    with ops.scope():
        x = _final_hidden(ops, params, config, rows, state)
        return ops.read(ops.linear_forward(x, params, head_name(config)))


def losses_and_gradients(
    ops: Ops,
    params: Parameters,
    config: MambaConfig,
    rows: Rows,
    grads: Gradients,
    need: Need,
    gradient_checkpointing: bool = False,
    adapters: Adapters = NO_ADAPTERS,
) -> float:
    """Add the gradients of the summed negative log-likelihood to `grads` and return that sum in nats.

    Only names in `need`, of weights and of adapters' tensors, are differentiated. With gradient_checkpointing a layer
    keeps its input alone and is computed again on the way back; the gradients are bit-identical.
    """
    T, head = rows.batch * rows.seq_len, head_name(config)
    with ops.scope(), DenseGradients(ops, params, adapters, grads, need) as dense:
        params, grads, need = dense.params, dense, dense.need
        streams = [ops.empty(T, config.hidden_size) for _ in range(config.num_hidden_layers + 1)]
        dstream = ops.empty(T, config.hidden_size)
        ops.embedding_forward(rows, params, EMBEDDING, streams[0], adapters.get(EMBEDDING))
        kept: list[LayerSaved] = []
        for layer in range(config.num_hidden_layers):
            if gradient_checkpointing:
                with ops.scope():
                    _layer_forward(ops, params, config, layer, rows, streams[layer], streams[layer + 1], adapters)
            else:
                x, out = streams[layer], streams[layer + 1]
                kept.append(_layer_forward(ops, params, config, layer, rows, x, out, adapters))
        with ops.scope():
            x, norm = ops.rms_norm_forward(streams[-1], params, FINAL_NORM, config.layer_norm_epsilon)
            dx = ops.empty(T, config.hidden_size)
            adapter = adapters.get(head)
            token_losses = ops.linear_cross_entropy_forward(rows, x, params, head, grads, need, dx, adapter)
            total = ops.total(token_losses)
            ops.rms_norm_backward(dx, norm, grads, need, dstream, add=False)
        for layer in reversed(range(config.num_hidden_layers)):
            with ops.scope():
                saved = (
                    _mixer_forward(ops, params, config, layer, rows, streams[layer], adapters)
                    if gradient_checkpointing
                    else kept[layer]
                )
                _layer_backward(ops, params, config, layer, rows, saved, dstream, grads, need, adapters)
        ops.embedding_backward(dstream, rows, params, EMBEDDING, grads, need, adapters.get(EMBEDDING))
    return total


def _final_hidden(
    ops: Ops,
    params: Parameters,
    config: MambaConfig,
    rows: Rows,
    state: list[LayerState] | None,
    adapters: Adapters = NO_ADAPTERS,
) -> Array:
    """Return the hidden states after the last norm: (T, d_model), in the caller's scope."""
    T = rows.batch * rows.seq_len
    x, spare = ops.empty(T, config.hidden_size), ops.empty(T, config.hidden_size)
    ops.embedding_forward(rows, params, EMBEDDING, x, adapters.get(EMBEDDING))
    for layer in range(config.num_hidden_layers):
        with ops.scope():
            _layer_forward(ops, params, config, layer, rows, x, spare, adapters, state[layer] if state else None)
        x, spare = spare, x
    return ops.rms_norm_forward(x, params, FINAL_NORM, config.layer_norm_epsilon)[0]


def _layer_forward(
    ops: Ops,
    params: Parameters,
    config: MambaConfig,
    layer: int,
    rows: Rows,
    x: Array,
    out: Array,
    adapters: Adapters,
    state: LayerState | None = None,
) -> LayerSaved:
    """out = x + mixer(norm(x)). x, out: (T, d_model)."""
    saved = _mixer_forward(ops, params, config, layer, rows, x, adapters, state)
    out_proj = layer_prefix(layer) + "mixer.out_proj.weight"
    bias = out_proj.replace("weight", "bias") if config.use_bias else None
    ops.linear_forward(saved.gated, params, out_proj, bias, residual=x, out=out, adapter=adapters.get(out_proj))
    return saved


def _mixer_forward(
    ops: Ops,
    params: Parameters,
    config: MambaConfig,
    layer: int,
    rows: Rows,
    x: Array,
    adapters: Adapters,
    state: LayerState | None = None,
) -> LayerSaved:
    """Everything of a layer before out_proj. x: (T, d_model)."""
    prefix = layer_prefix(layer)
    mixer = prefix + "mixer."
    d_inner, d_state, rank = config.d_inner, config.state_size, config.dt_rank
    y, norm = ops.rms_norm_forward(x, params, prefix + "norm.weight", config.layer_norm_epsilon)
    in_bias = mixer + "in_proj.bias" if config.use_bias else None
    in_proj, x_proj, dt_proj = (f"{mixer}{name}.weight" for name in ("in_proj", "x_proj", "dt_proj"))
    xz = ops.linear_forward(y, params, in_proj, in_bias, adapter=adapters.get(in_proj))
    conv_bias = mixer + "conv1d.bias" if config.use_conv_bias else None
    u, conv = ops.causal_conv1d_forward(
        rows, Columns(xz, 0, d_inner), params, mixer + "conv1d.weight", conv_bias, state
    )
    x_dbl = ops.linear_forward(u, params, x_proj, adapter=adapters.get(x_proj))
    delta = ops.linear_forward(Columns(x_dbl, 0, rank), params, dt_proj, adapter=adapters.get(dt_proj))
    gated, scan = ops.selective_scan_forward(
        rows,
        u,
        delta,
        Columns(x_dbl, rank, d_state),
        Columns(x_dbl, rank + d_state, d_state),
        Columns(xz, d_inner, d_inner),
        params,
        mixer + "A_log",
        mixer + "D",
        mixer + "dt_proj.bias",
        state,
    )
    return LayerSaved(norm, y, xz, conv, u, x_dbl, scan, gated)


def _layer_backward(
    ops: Ops,
    params: Parameters,
    config: MambaConfig,
    layer: int,
    rows: Rows,
    saved: LayerSaved,
    dstream: Array,
    grads: Gradients,
    need: Need,
    adapters: Adapters,
) -> None:
    """Turn dstream, the gradient of a layer's output, into that of its input. dstream: (T, d_model)."""
    T = rows.batch * rows.seq_len
    prefix = layer_prefix(layer)
    mixer = prefix + "mixer."
    d_inner, d_state, rank = config.d_inner, config.state_size, config.dt_rank
    dgated, du, ddelta = (ops.empty(T, d_inner) for _ in range(3))
    dxz, dx_dbl, dy = (
        ops.empty(T, 2 * d_inner),
        ops.empty(T, rank + 2 * d_state),
        ops.empty(T, config.hidden_size),
    )

    def linear(
        dy: Array, x: Array | Columns, name: str, dx: Array | Columns, bias: bool = False, add: bool = False
    ) -> None:
        weight, offset = f"{mixer}{name}.weight", f"{mixer}{name}.bias" if bias else None
        ops.linear_backward(dy, x, params, weight, offset, grads, need, dx, add, adapters.get(weight))

    linear(dstream, saved.gated, "out_proj", dgated, bias=config.use_bias)
    ops.selective_scan_backward(
        dgated,
        saved.scan,
        grads,
        need,
        du,
        ddelta,
        Columns(dx_dbl, rank, d_state),
        Columns(dx_dbl, rank + d_state, d_state),
        Columns(dxz, d_inner, d_inner),
    )
    linear(ddelta, Columns(saved.x_dbl, 0, rank), "dt_proj", Columns(dx_dbl, 0, rank))
    linear(dx_dbl, saved.u, "x_proj", du, add=True)
    ops.causal_conv1d_backward(du, saved.conv, grads, need, Columns(dxz, 0, d_inner))
    linear(dxz, saved.y, "in_proj", dy, bias=config.use_bias)
    ops.rms_norm_backward(dy, saved.norm, grads, need, dstream, add=True)
