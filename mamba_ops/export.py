"""An adapter taken elsewhere: merged into its base as a plain Hugging Face folder, or as a folder that PEFT can run.

`python -m mamba_ops.export merge BASE ADAPTER OUTPUT` and `python -m mamba_ops.export peft BASE ADAPTER OUTPUT`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mamba_ops.checkpoint import SAVED, load_model, save_model
from mamba_ops.command_line import Parser
from mamba_ops.config import MambaConfig
from mamba_ops.lora import adapters, merged, tensor_shapes
from mamba_ops.peft import Adapted, check_base, load_adapter, write_adapter
from mamba_ops.peft_config import adapter_config
from mamba_ops.tensors import fingerprint, mismatch
from mamba_ops.tokenizer import TOKENIZER

REFUSED = {
    "dt_proj": "transformers reads dt_proj.weight itself and would bypass an adapter",
    "out_proj": "PEFT refuses it for Mamba",
    "conv1d": "PEFT refuses it for Mamba",
    "A_log": "PEFT's target_modules are modules, and it is a parameter",
    "embeddings": "PEFT's adapter would act on the lookup alone, not on the tied head",
}
"""Why PEFT cannot run an adapter on a target."""

FULL = ("dt_proj", "out_proj")
"""Targets whose whole modules PEFT can keep beside the adapters."""


class Opened(NamedTuple):
    """A base and an adapter that belongs to it."""

    config: MambaConfig
    params: dict[str, np.ndarray]
    adapted: Adapted
    base_fingerprint: str


def merge(
    base: str | Path,
    adapter: str | Path,
    output: str | Path,
    *,
    dtype: str = "float32",
    max_shard_size: int | str | None = None,
) -> None:
    """Write the folder of a base with an adapter's product added to its weights, and the base's tokenizer.

    The sum is formed in float64 and rounded once to float32, which dtype "bfloat16" rounds again. Raises
    CheckpointError when the two do not belong together, FileExistsError when `output` exists, and what `load_model`,
    `load_adapter` and `save_model` raise.
    """
    found = open_adapted(base, adapter)
    tokenizer = Path(base) / TOKENIZER
    save_model(
        output,
        found.config,
        add_to_base(found),
        tokenizer if tokenizer.is_file() else None,
        max_shard_size=max_shard_size,
        dtype=dtype,
    )


def export_peft(base: str | Path, adapter: str | Path, output: str | Path, *, full_weights: bool = False) -> None:
    """Write an adapter folder with which PEFT gives the same logits on the same base.

    Adapters on in_proj and x_proj, and on the embeddings of an untied base, are PEFT's own. With full_weights,
    dt_proj and out_proj go along as whole merged modules (PEFT's modules_to_save), of full size and no longer of low
    rank. Raises CheckpointError naming each target that PEFT cannot run and why, and as `merge` does.
    """
    found = open_adapted(base, adapter)
    config, lora = found.config, found.adapted.lora
    whole = [target for target in FULL if target in lora.target_modules]
    kept = [target for target in lora.target_modules if _runs(target, config)]
    lost = [target for target in lora.target_modules if target not in kept and not (full_weights and target in whole)]
    if lost or not kept:
        raise mismatch(adapter, "target_modules", ", ".join(lost or whole), _offer(lost, bool(kept)))
    part = lora.model_copy(update={"target_modules": kept})
    tensors = {name: found.adapted.tensors[name] for name in tensor_shapes(config, part)}
    if whole:
        weights = add_to_base(found)
        tensors |= {name: weights[name] for name in weights if name.rpartition(".")[0].endswith(tuple(whole))}
    write_adapter(output, adapter_config(config, part, base, whole), tensors, found.base_fingerprint)


def open_adapted(base: str | Path, adapter: str | Path) -> Opened:
    """Read a base and its adapter; raises CheckpointError unless they belong together."""
    config, params = load_model(base)
    adapted = load_adapter(adapter, config)
    found = fingerprint(params)
    check_base(adapted, found)
    return Opened(config, params, adapted, found)


def add_to_base(found: Opened) -> dict[str, np.ndarray]:
    """Return the base's weights with the adapter added; beyond float32 they become inf."""
    with np.errstate(over="ignore"):  # a check, or the gate to disk, refuses inf by name
        return merged(
            found.config, {**found.params, **found.adapted.tensors}, adapters(found.config, found.adapted.lora)
        )


def _runs(target: str, config: MambaConfig) -> bool:
    """Whether PEFT runs an adapter on a target."""
    return target not in REFUSED or (target == "embeddings" and not config.tie_word_embeddings)


def _offer(lost: Sequence[str], kept: bool) -> str:
    """Return what is expected in place of targets that PEFT cannot run."""
    reasons = "; ".join(f"{target}: {REFUSED[target]}" for target in lost)
    parts = [f"in_proj and x_proj, which PEFT runs ({reasons})" if lost else "in_proj or x_proj beside them"]
    if kept and set(lost) & set(FULL):
        parts.append("--modules-to-save takes dt_proj and out_proj along as full weights")
    return "; ".join([*parts, "the merge command makes a plain folder of any adapter"])


def _parser() -> Parser:
    parser = Parser(prog="mamba_ops.export", description="Take an adapter elsewhere.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    folder = commands.add_parser("merge", help="Add it to its base: a plain Hugging Face folder.", allow_abbrev=False)
    peft = commands.add_parser("peft", help="Make a folder that PEFT can run on Mamba.", allow_abbrev=False)
    for command in (folder, peft):
        command.add_argument("base", help="Folder of the base.")
        command.add_argument("adapter", help="Folder of the adapter.")
        command.add_argument("output", help="Folder to write; it must not exist.")
    folder.add_argument("--dtype", choices=list(SAVED), default="float32", help="Dtype of the weights.")
    folder.add_argument("--max-shard-size", metavar="SIZE", help="Most bytes of a file, such as 500MB; default: none.")
    text = "Take dt_proj and out_proj along as full weights, by PEFT's modules_to_save."
    peft.add_argument("--modules-to-save", action="store_true", help=text)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the folder; return 0, or 1 with one line on stderr; wrong arguments exit with 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    folders = options.base, options.adapter, options.output
    try:
        if options.command == "merge":
            merge(*folders, dtype=options.dtype, max_shard_size=options.max_shard_size)
        else:
            export_peft(*folders, full_weights=options.modules_to_save)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
