"""Adapters of the small weights, `conv1d.weight` and `A_log`: their ops take the sum of weight and adapter."""

from types import TracebackType
from typing import Self

from mamba_ops.ops import Adapters, Array, Dropout, Gradients, Need, Ops, Parameters
from mamba_ops.parameters import EMBEDDING

DENSE = (".conv1d.weight", ".A_log")
"""Ends of their names."""


def with_dropout(found: Adapters, dropout: Dropout) -> Adapters:
    """Return the adapters with dropout, for a rate above 0 and where an adapter has an input that can be dropped."""
    if not dropout.rate:
        return found
    return {
        weight: adapter if weight.endswith((*DENSE, EMBEDDING)) else adapter._replace(dropout=dropout)
        for weight, adapter in found.items()
    }


def with_dense(ops: Ops, params: Parameters, adapters: Adapters) -> Parameters:
    """Return the parameters, small weights with their adapters added, in arrays of the open scope."""
    added = {name: ops.low_rank_forward(params, name, adapters[name]) for name in adapters if name.endswith(DENSE)}
    return {**params, **added} if added else params


class DenseGradients:
    """The gradients of a batch, where those of small weights with adapters go to arrays of the open scope.

    On leaving without an error they become gradients of the adapters: dA and dB are linear in dW, which is small.
    params: with the adapters added. need: what trains, and the small weights whose gradient that takes.
    """

    def __init__(self, ops: Ops, params: Parameters, adapters: Adapters, grads: Gradients, need: Need):
        self._ops, self._own, self._grads, self._wanted = ops, params, grads, need
        self._adapters = {
            name: adapter
            for name, adapter in adapters.items()
            if name.endswith(DENSE) and (adapter.A in need or adapter.B in need)
        }
        self._arrays: dict[str, Array] = {name: ops.empty_like(params[name]) for name in self._adapters}
        self.params = with_dense(ops, params, adapters)
        self.need: Need = frozenset(need) | self._arrays.keys()

    def take(self, name: str) -> tuple[Array, bool]:
        """Return the buffer of `name` and whether to add to it."""
        return (self._arrays[name], False) if name in self._arrays else self._grads.take(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            for name, adapter in self._adapters.items():
                array = self._arrays[name]
                self._ops.low_rank_backward(array, self._own, adapter, self._grads, self._wanted)
