"""What the parity tests share: transformers' model with our parameters, float64 throughout, and batches."""

import os
from contextlib import contextmanager

import numpy as np
import pytest

from mamba_ops import parameters
from mamba_ops.config import MambaConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.ops import IGNORED, Batch

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@contextmanager
def _float64():
    """Within, every float32 that torch is asked for by name becomes float64: `.float()`, `.to(torch.float32)`."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Widen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.float:
                func = torch.Tensor.double
            widen = {torch.float32: torch.float64}
            args = [widen.get(value, value) if isinstance(value, torch.dtype) else value for value in args]
            named = {
                name: widen.get(value, value) if isinstance(value, torch.dtype) else value
                for name, value in (kwargs or {}).items()
            }
            return func(*args, **named)

    with Widen():
        yield


@pytest.fixture
def float64_transformers():
    """The places where transformers forces float32 (RMSNorm, residual, A, D, dt bias, dB * u, logits, loss)."""
    with _float64():
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ops64():
    return open_cpu(np.float64, threads=1)


@pytest.fixture(scope="session")
def ops32():
    return open_cpu(np.float32, threads=1)


@pytest.fixture
def random_parameters():
    """Return initial parameters moved off their special values (zeros and ones), as the dtype."""

    def make(config: MambaConfig, seed: int, dtype: type = np.float64) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        initial = parameters.init(config, seed, np.float64)
        return {name: (p + 0.1 * rng.standard_normal(p.shape)).astype(dtype) for name, p in initial.items()}

    return make


@pytest.fixture
def random_batch():
    """Return rows of one document each; a share of the targets carries no loss."""

    def make(config: MambaConfig, seed: int, batch: int, seq_len: int, ignored: float = 0.0) -> Batch:
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, config.vocab_size, (batch, seq_len + 1))
        targets = np.where(rng.random((batch, seq_len)) < ignored, IGNORED, ids[:, 1:])
        positions = np.broadcast_to(np.arange(seq_len, dtype=np.uint32), (batch, seq_len)).copy()
        return Batch(ids[:, :-1].copy(), targets, positions)

    return make


@pytest.fixture
def reference():
    """Return transformers' model in training mode with the given parameters, in their dtype."""
    import torch
    from transformers import MambaConfig as HFConfig
    from transformers import MambaForCausalLM

    def make(config: MambaConfig, params: dict[str, np.ndarray]):
        model = MambaForCausalLM(HFConfig(**config.model_dump())).train()
        tensors = {name: torch.from_numpy(array.copy()) for name, array in params.items()}
        if config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["backbone.embeddings.weight"]
        model.to(next(iter(tensors.values())).dtype)
        model.load_state_dict(tensors)
        assert (model.lm_head.weight is model.backbone.embeddings.weight) == config.tie_word_embeddings
        return model

    return make
