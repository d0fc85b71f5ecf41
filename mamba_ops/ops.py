"""The interface that `model.py` is written against; `cpu/` and `gpu/` implement it.

Activations are `(batch * seq_len, columns)` arrays, rows in (batch, time) order. An input or a destination
that is a range of columns is passed as `Columns`; nothing above an op slices, adds or copies.
`x_forward(...)` returns `(y, saved)`; `saved` holds references, valid while the scope it was made in is open.
`x_backward(dy, saved, grads, need, ...)` adds into `grads` for names in `need` only and writes the gradients
of its inputs into destinations.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

Array: TypeAlias = Any
"""A NumPy array on the CPU side, a device buffer on the GPU side."""

Parameters: TypeAlias = Mapping[str, Array]
"""Parameters by their full Hugging Face key."""

Need: TypeAlias = Collection[str]
"""Names of the parameters that train."""

IGNORED = -1
"""The target of a token that carries no loss."""


class Columns(NamedTuple):
    """The columns `first .. first + width - 1` of a two-dimensional array."""

    array: Array
    first: int
    width: int


@dataclass(frozen=True)
class Batch:
    """Rows of tokens on the host.

    ids: (batch, seq_len) int64. targets: the same shape, `IGNORED` where a token carries no loss.
    positions: the same shape, uint32, how many tokens of the same document lie before this one within reach
    of the state: 0 resets the scan, and the convolution's tap at lag k counts only where position >= k.
    """

    ids: np.ndarray
    targets: np.ndarray
    positions: np.ndarray

    @property
    def target_count(self) -> int:
        """Tokens that carry loss."""
        return int(np.count_nonzero(self.targets != IGNORED))


class Dropout(NamedTuple):
    """Which elements of an adapter's input are dropped: a hash of all this and of token and column, see `dropout.py`.

    rate: the share that is dropped, 0 <= rate < 1. step: of the optimizer. first: tokens of the step before this batch,
    so that a mask does not depend on how the rows of a step are split into batches.
    """

    rate: float
    seed: int
    step: int
    first: int = 0


class Adapter(NamedTuple):
    """A low-rank addition to a frozen weight: weight + scale B A (Hu et al. 2021), by the names of its two tensors.

    For a weight of (out, in): A: (r, in), B: (out, r). For the embedding, as in PEFT, A: (r, vocab_size) and
    B: (d_model, r), and what is added is scale (B A)^T.
    """

    A: str
    B: str
    scale: float
    dropout: Dropout | None = None


Adapters: TypeAlias = Mapping[str, Adapter]
"""Adapters by the name of the weight that they belong to."""

NO_ADAPTERS: Adapters = MappingProxyType({})

Rows: TypeAlias = Any
"""A batch where the ops want it, with `batch` and `seq_len`; each side has a record of its own."""


class LayerState(NamedTuple):
    """What a layer carries from one window to the next; ops update it in place.

    conv: (batch, d_conv - 1, d_inner), the last inputs of the convolution, oldest first.
    scan: (batch, d_state, d_inner).
    """

    conv: Array
    scan: Array


class Gradients(Protocol):
    """The gradient buffers of a step, by parameter name."""

    def take(self, name: str) -> tuple[Array, bool]:
        """Return the buffer of `name` and whether to add to it (False on the first use in a step)."""


class Ops(Protocol):
    """One side's ops. Shapes: T = batch * seq_len tokens."""

    @property
    def name(self) -> str:
        """What runs them: `NumPy`, or the adapter with its driver."""

    def scope(self) -> AbstractContextManager[None]:
        """Give back, on leaving, every array that `empty` returned inside."""

    def empty(self, rows: int, columns: int) -> Array:
        """Return an uninitialised activation that lives as long as the innermost open scope."""

    def empty_like(self, parameter: Array) -> Array:
        """Return an uninitialised activation of a parameter's shape."""

    def rows(self, batch: Batch) -> Rows:
        """Bring a batch to where the ops run."""

    def layer_state(self, batch: int, d_inner: int, d_state: int, d_conv: int) -> LayerState:
        """Return a zero state."""

    def read(self, array: Array) -> np.ndarray:
        """Return a copy on the host."""

    def upload_parameter(self, name: str, array: np.ndarray) -> Array:
        """Return a parameter where the ops run: on the CPU the array itself."""

    def write_parameter(self, parameter: Array, array: np.ndarray) -> None:
        """Overwrite a parameter with a host array of its shape; nothing to do where they are one."""

    def zeros_like(self, array: Array) -> Array:
        """Return zeros of the same shape, kept until `release`."""

    def zero(self, array: Array) -> None:
        """Set every element to zero."""

    def release(self, arrays: Iterable[Array]) -> None:
        """Free what `upload_parameter` and `zeros_like` returned."""

    def total(self, losses: Array) -> float:
        """Return the sum of per-token losses, accumulated in float64."""

    def embedding_forward(
        self, rows: Rows, params: Parameters, weight: str, out: Array, adapter: Adapter | None = None
    ) -> None:
        """out_t = weight[ids_t] + scale B A[:, ids_t]. out: (T, d_model), A: (r, vocab_size), B: (d_model, r)."""

    def embedding_backward(
        self,
        dy: Array,
        rows: Rows,
        params: Parameters,
        weight: str,
        grads: Gradients,
        need: Need,
        adapter: Adapter | None = None,
    ) -> None:
        """dweight[i] += sum of dy_t over the t with ids_t = i; with an adapter, for names in `need`,

        dA[:, i] += scale B^T times that sum, and dB += scale sum_t dy_t A[:, ids_t]^T.
        """

    def rms_norm_forward(self, x: Array, params: Parameters, weight: str, epsilon: float) -> tuple[Array, Any]:
        """y = weight * x / sqrt(mean(x^2) + epsilon). x, y: (T, d_model)."""

    def rms_norm_backward(self, dy: Array, saved: Any, grads: Gradients, need: Need, dx: Array, add: bool) -> None:
        """Write (or add) dx: (T, d_model)."""

    def linear_forward(
        self,
        x: Array | Columns,
        params: Parameters,
        weight: str,
        bias: str | None = None,
        residual: Array | None = None,
        out: Array | None = None,
        adapter: Adapter | None = None,
    ) -> Array:
        """y = x weight^T + bias + residual + scale drop(x) A^T B^T.

        x: (T, in), weight: (out, in), residual, y: (T, out), A: (r, in), B: (out, r).

        Its backward needs nothing but x, so nothing else is saved: a mask is a hash, and computed again.
        """

    def linear_backward(
        self,
        dy: Array | Columns,
        x: Array | Columns,
        params: Parameters,
        weight: str,
        bias: str | None,
        grads: Gradients,
        need: Need,
        dx: Array | Columns,
        add: bool = False,
        adapter: Adapter | None = None,
    ) -> None:
        """dweight += dy^T x; dbias += column sums of dy; dx (written or added) = dy weight. The residual's is dy.

        With an adapter, e = scale dy B: dA += e^T drop(x), dB += scale dy^T drop(x) A^T, and dx has also drop'(e A),
        the same elements dropped. The weight's own gradient is never formed for it.
        """

    def low_rank_forward(self, params: Parameters, weight: str, adapter: Adapter) -> Array:
        """Return weight + scale B A in the weight's shape, (out, ...), for the small weights of other ops."""

    def low_rank_backward(
        self, dweight: Array, params: Parameters, adapter: Adapter, grads: Gradients, need: Need
    ) -> None:
        """dA += scale B^T dweight; dB += scale dweight A^T. dweight: (out, in)."""

    def causal_conv1d_forward(
        self,
        rows: Rows,
        x: Columns,
        params: Parameters,
        weight: str,
        bias: str | None,
        state: LayerState | None = None,
    ) -> tuple[Array, Any]:
        """y_t = SiLU(bias + sum over k of weight[:, 0, d_conv - 1 - k] * x_{t-k} where positions_t >= k).

        x, y: (T, d_inner); weight: (d_inner, 1, d_conv). With a state, x before the row comes from it.
        """

    def causal_conv1d_backward(self, dy: Array, saved: Any, grads: Gradients, need: Need, dx: Columns) -> None:
        """Write dx."""

    def selective_scan_forward(
        self,
        rows: Rows,
        u: Array,
        delta: Array,
        B: Columns,
        C: Columns,
        z: Columns,
        params: Parameters,
        A_log: str,
        D: str,
        delta_bias: str,
        state: LayerState | None = None,
    ) -> tuple[Array, Any]:
        """y_t = (C_t . h_t + D u_t) SiLU(z_t), h_t = a_t h_{t-1} + softplus(delta_t + delta_bias) B_t u_t.

        a_t = exp(-softplus(delta_t + delta_bias) exp(A_log)), and 0 where positions_t = 0.
        u, delta, z, y: (T, d_inner); B, C: (T, d_state); A_log: (d_inner, d_state); D, delta_bias: (d_inner,).
        With a state, h_0 comes from it and the last h is left in it.
        """

    def selective_scan_backward(
        self,
        dy: Array,
        saved: Any,
        grads: Gradients,
        need: Need,
        du: Array,
        ddelta: Array,
        dB: Columns,
        dC: Columns,
        dz: Columns,
    ) -> None:
        """Write du, ddelta, dB, dC and dz; ddelta is the gradient of delta before bias and softplus."""

    def linear_cross_entropy_forward(
        self,
        rows: Rows,
        x: Array,
        params: Parameters,
        weight: str,
        grads: Gradients | None = None,
        need: Need = (),
        dx: Array | None = None,
        adapter: Adapter | None = None,
    ) -> Array:
        """losses_t = log(sum_v exp(x_t . weight_v)) - x_t . weight_target, 0 where the target is `IGNORED`.

        x: (T, d_model), weight: (vocab_size, d_model), losses: (T,). With grads, dweight is added and dx
        written as of the sum of the losses. By row blocks: the (T, vocab_size) logits never exist whole. An adapter is
        that of a tied embedding, A: (r, vocab_size), B: (d_model, r): the logits have also scale (x B) A.
        """

    def adamw(
        self,
        parameter: Array,
        gradient: Array,
        moment1: Array,
        moment2: Array,
        count: int,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        weight_decay: float,
        gradient_scale: float,
        max_delta: float,
        rows: tuple[int, int] | None = None,
    ) -> None:
        """Step `parameter` and its moments in place; `count` is 1 on the first step of this parameter.

        rows: step the rows first .. end - 1 alone, with their part of the gradient; the moments are of those rows.
        """

    def global_norm(self, gradients: Mapping[str, Array]) -> dict[str, float]:
        """Return the L2 norm of each gradient, accumulated in float64; nan or inf where an element is."""
