"""Configuration records: validated here and nowhere else.

`MambaConfig` is Hugging Face's `config.json`; every other class is the configuration of one stage of the
pipeline and is shared by the library and by Dagster.
"""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

TARGETS = ("in_proj", "x_proj", "dt_proj", "out_proj", "conv1d", "A_log", "embeddings")
"""What an adapter can be put on: the names of Mamba's modules, as PEFT's target_modules has them, and A_log."""

UNSUPPORTED_HINT = "only model_type 'mamba' (Mamba-1) is supported"


def _number(value: Any) -> Any:
    """Turn a numeric string (YAML 1.1 reads `1e-4` as text) into a float; refuse booleans."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {value!r}")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"expected a number, got {value!r}") from None
    return value


def _text(value: Any) -> Any:
    """Turn a number into text, so that YAML needs no quotes around it."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def byte_size(value: int | str) -> int:
    """Return bytes from a number or text such as "500MB" or "2GB" (powers of 1,000, as transformers reads them).

    Raises ValueError on anything else and below 1.
    """
    found = re.fullmatch(r"\s*(\d+)\s*([KMGT]?)B?\s*", str(value), re.IGNORECASE | re.ASCII)
    size = int(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " ") if found else 0
    if size < 1 or isinstance(value, bool):
        raise ValueError(f"expected bytes as a number or text such as 500MB or 2GB, got {value!r}")
    return size


def _size_text(value: Any) -> Any:
    """Turn bytes into text and check it."""
    if isinstance(value, int | str):
        byte_size(value)
        return str(value)
    return value


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
ByteSize = Annotated[str, BeforeValidator(_size_text)]


class Stage(BaseModel):
    """A frozen stage configuration that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CorpusConfig(Stage):
    """Which documents are read, and how they are split."""

    paths: list[str] = Field(
        default=[],
        description="Files, folders or globs, here or at an fsspec address such as s3://bucket/folder: UTF-8 text (a "
        "file is a document), .jsonl (a line is one) or .parquet (a row is one), also as .gz and .zst; empty: the "
        "documentation topics and standard library sources of the running CPython.",
    )
    validation_paths: list[str] = Field(
        default=[],
        description="The same for validation; empty: documents go to validation by content hash.",
    )
    form: Literal["auto", "text", "prompt", "chat"] = Field(
        default="auto",
        description="What a line or row holds: text: a string under text_column; prompt: strings under prompt and "
        "completion, loss on the completion; chat: a list under messages, loss on what the assistant says; auto: the "
        "one that its keys say.",
    )
    text_column: str = Field(
        default="text", min_length=1, description="The key of a line, or column of a parquet file, that holds the text."
    )
    default: Literal["all", "documentation", "sources"] = Field(
        default="all",
        description="What is read of the running CPython when paths is empty: its documentation topics, its standard "
        "library's sources, or all.",
    )
    storage_options: dict[str, Any] = Field(
        default={},
        description="Options of fsspec's file system for addresses, such as endpoint_url; keys and other secrets "
        "belong in the environment (AWS_ACCESS_KEY_ID, FSSPEC_S3_..., ...).",
    )
    validation_fraction: Number = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Share of the hash range that goes to validation; unused with validation_paths.",
    )
    max_documents: int | None = Field(
        default=None, ge=1, le=1 << 53, description="Keep only the first documents in reading order; none: all."
    )

    @model_validator(mode="after")
    def _paths_or_default(self) -> "CorpusConfig":
        if self.paths and self.default != "all":
            raise ValueError(f"default: expected all, as paths are given, got {self.default!r} with {self.paths}")
        return self


class TokenizerConfig(Stage):
    """Which tokenizer turns text into ids."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="A tokenizer.json, or a checkpoint folder holding one; none: a byte-level BPE "
        "trained on the training split.",
    )
    vocab_size: int = Field(
        default=1024, ge=257, le=1_000_000, description="Vocabulary of a trained BPE, the end-of-text token included."
    )
    retrain: bool = Field(
        default=False, description="Train the BPE again although one with this configuration exists already."
    )
    end_of_text: str = Field(
        default="<|endoftext|>", min_length=1, description="The token that stands between documents."
    )


class BatchesConfig(Stage):
    """How the tokenized training split is cut into rows and batches."""

    seq_len: int = Field(default=512, ge=1, le=1 << 31, description="Target tokens in a row.")
    batch_size: int = Field(default=1, ge=1, le=1 << 20, description="Rows in a batch.")
    seed: int = Field(default=0, ge=0, description="Seed of the row order; each epoch has an order of its own.")


class WeightsConfig(Stage):
    """Where the base weights come from: a checkpoint, or a seed and a shape."""

    checkpoint: str | None = Field(
        default=None,
        min_length=1,
        description="A checkpoint folder, Hugging Face's or in the original layout; the shape below is then read "
        "from it and must not be set.",
    )
    resize_embeddings: bool = Field(
        default=False,
        description="Add rows to the checkpoint's embedding (and untied head) when the tokenizer needs more: the mean "
        "row with a little noise by seed.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of the initial weights.")
    hidden_size: int = Field(default=96, ge=1, le=1 << 17, description="d_model.")
    num_hidden_layers: int = Field(default=3, ge=1, le=10_000, description="Layers.")
    state_size: int = Field(default=16, ge=1, le=1 << 12, description="d_state.")
    conv_kernel: int = Field(default=4, ge=1, le=1 << 8, description="d_conv: taps of the causal convolution.")
    expand: int = Field(default=2, ge=1, le=1 << 8, description="d_inner = expand * d_model.")
    time_step_rank: int | None = Field(default=None, ge=1, description="dt_rank; none: ceil(d_model / 16).")
    use_bias: bool = Field(default=False, description="Biases in in_proj and out_proj.")
    use_conv_bias: bool = Field(default=True, description="Bias in the convolution.")
    tie_word_embeddings: bool = Field(default=True, description="The head is the embedding.")
    layer_norm_epsilon: Number = Field(default=1e-5, gt=0, lt=1, description="Epsilon of RMSNorm.")
    rescale_prenorm_residual: bool = Field(
        default=True, description="Divide the initial out_proj by the square root of the number of layers."
    )

    @model_validator(mode="after")
    def _shape_or_checkpoint(self) -> "WeightsConfig":
        about_checkpoint = {"checkpoint", "resize_embeddings"} | ({"seed"} if self.resize_embeddings else set())
        extra = sorted(self.model_fields_set - about_checkpoint) if self.checkpoint else []
        changed = [name for name in extra if getattr(self, name) != type(self).model_fields[name].default]
        if changed:
            raise ValueError(f"with checkpoint={self.checkpoint!r} the shape comes from it; remove {changed}")
        if self.resize_embeddings and not self.checkpoint:
            raise ValueError("resize_embeddings: expected a checkpoint whose embedding it changes, got none")
        return self


class SaveConfig(Stage):
    """How weights are written."""

    save_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Dtype of the weights' files; checkpoints of a run stay float32."
    )
    max_shard_size: ByteSize | None = Field(
        default=None,
        description="Most bytes of a file of weights, such as 500MB or 2GB (powers of 1,000); none: one file.",
    )


class TrainConfig(SaveConfig):
    """The training run; names as in transformers' TrainingArguments."""

    learning_rate: Number = Field(default=1e-4, gt=0, le=10, description="Peak rate, reached after the warm-up.")
    weight_decay: Number = Field(
        default=0.01, ge=0, le=1, description="Decoupled decay; never on A_log, D, norms and biases."
    )
    adam_beta1: Number = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment.")
    adam_beta2: Number = Field(default=0.999, ge=0, lt=1, description="Decay of the second moment.")
    adam_epsilon: Number = Field(default=1e-8, ge=1e-30, le=1, description="Added to the root of the second moment.")
    max_grad_norm: Number = Field(default=1.0, ge=0, description="Clip by the global norm; 0: never.")
    max_delta: Number = Field(
        default=0.0, ge=0, description="Trust region: largest change of an element in a step; 0: unbounded."
    )
    num_train_epochs: int = Field(default=5, ge=1, description="Epochs; max_steps cuts them short or repeats them.")
    max_steps: int | None = Field(default=None, ge=1, description="Optimizer steps; none: by num_train_epochs.")
    max_seconds: Number | None = Field(
        default=None, gt=0, description="Time budget in seconds, all resumed parts together; none: unbounded."
    )
    gradient_accumulation_steps: int = Field(default=1, ge=1, description="Batches in an optimizer step.")
    gradient_checkpointing: bool = Field(
        default=False, description="Keep only each layer's input and recompute the rest; same gradients."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which the rate rises linearly to its peak.")
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = Field(
        default="cosine",
        description="How the rate falls after the warm-up (to 0 one step past the last; constant: not).",
    )
    save_steps: int = Field(default=500, ge=1, description="Optimizer steps between checkpoints.")
    logging_seconds: Number = Field(default=5.0, gt=0, description="Seconds between progress reports.")
    max_skipped_steps: int = Field(
        default=10, ge=0, description="Non-finite steps in a row that are skipped before the run fails."
    )
    memory_limit: ByteSize | None = Field(
        default=None,
        description="Most memory that training may take, such as 16GB; none: what is available, or the limit of the "
        "control group. A run that takes more is refused before it starts.",
    )


class WslaTrainConfig(TrainConfig):
    """Write-through adaptation: x_proj alone trains, in small steps."""

    max_delta: Number = Field(
        default=0.05, ge=0, description="Trust region: largest change of an element in a step; 0: unbounded."
    )


class LoraConfig(Stage):
    """Low-rank adapters; names and meanings as in PEFT's LoraConfig."""

    r: int = Field(default=8, ge=1, le=1 << 17, description="Rank; at most a target's smaller dimension is used.")
    lora_alpha: Number = Field(
        default=16, gt=0, le=1e6, description="What is added is lora_alpha / r B A, r being the rank that is used."
    )
    use_rslora: bool = Field(default=False, description="Rank-stabilised: lora_alpha / sqrt(r) in place of / r.")
    lora_dropout: Number = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of an adapter's input that is dropped in training; conv1d, A_log and embeddings have none.",
    )
    target_modules: list[str] = Field(
        default=["in_proj", "x_proj"],
        description="What is adapted: " + ", ".join(TARGETS) + ".",
    )

    @field_validator("target_modules")
    @classmethod
    def _known_targets(cls, names: list[str]) -> list[str]:
        unknown = [name for name in names if name not in TARGETS]
        if unknown or not names:
            raise ValueError(f"expected some of {', '.join(TARGETS)}, got {unknown or names}")
        return [name for name in TARGETS if name in names]


class LoraTrainConfig(TrainConfig, LoraConfig):
    """The training run of adapters on frozen weights."""

    seed: int = Field(default=0, ge=0, description="Seed of the adapters' initial values and of dropout.")
    adapter: str | None = Field(
        default=None,
        min_length=1,
        description="An adapter folder to continue from; its rank, alpha and targets must be those of this "
        "configuration. None: a new adapter.",
    )


class GenerateConfig(Stage):
    """How text is continued; names and meanings as in transformers' GenerationConfig."""

    max_new_tokens: int = Field(default=200, ge=0, description="Tokens of a sample at most.")
    temperature: Number = Field(default=0.8, ge=0, description="What logits are divided by; 0: the likeliest token.")
    top_k: int = Field(default=0, ge=0, description="Draw from so many likeliest tokens; 0: from all.")
    top_p: Number = Field(
        default=1.0, ge=0, le=1, description="Draw from the fewest likeliest tokens with this probability together."
    )
    repetition_penalty: Number = Field(
        default=1.0,
        ge=0.01,
        le=100,
        description="What a logit above 0 is divided by, and one below multiplied, of tokens that the text has.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of the draws.")


class EvaluateConfig(GenerateConfig):
    """Perplexity, and one sampled text."""

    window: int = Field(default=1024, ge=1, description="Tokens of a document processed at once; the state is carried.")
    batch_size: int = Field(default=1, ge=1, description="Documents read side by side.")
    baseline: Annotated[str, BeforeValidator(_text)] = Field(
        default="unigram",
        description="What the perplexity has to be better than: none, unigram, bigram, or a number.",
    )
    prompt: str = Field(default="", description="Text that the sample continues; empty: the end-of-text token.")

    @model_validator(mode="after")
    def _known_baseline(self) -> "EvaluateConfig":
        if self.baseline in ("none", "unigram", "bigram"):
            return self
        try:
            limit = float(self.baseline)
        except ValueError:
            limit = math.nan
        if not (math.isfinite(limit) and limit > 1):
            raise ValueError(f"baseline: expected none, unigram, bigram or a number above 1, got {self.baseline!r}")
        return self


class SamplesConfig(GenerateConfig):
    """Texts that trained weights continue."""

    prompts: list[str] = Field(
        default=[""], min_length=1, description="Beginnings of documents, each continued; empty text: from nothing."
    )


class MambaConfig(BaseModel):
    """Hugging Face's `config.json` of a Mamba-1 model; unknown keys are kept and written back."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    model_type: Literal["mamba"] = "mamba"
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1, le=10_000)
    state_size: int = Field(default=16, ge=1)
    conv_kernel: int = Field(default=4, ge=1)
    expand: int = Field(default=2, ge=1)
    time_step_rank: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    use_bias: bool = False
    use_conv_bias: bool = True
    tie_word_embeddings: bool = True
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    hidden_act: Literal["silu"] = "silu"
    rescale_prenorm_residual: bool = False
    time_step_min: float = Field(default=0.001, gt=0)
    time_step_max: float = Field(default=0.1, gt=0)
    time_step_floor: float = Field(default=1e-4, gt=0)
    time_step_scale: float = Field(default=1.0, gt=0)
    time_step_init_scheme: Literal["random", "constant"] = "random"
    initializer_range: float = Field(default=0.02, gt=0)
    bos_token_id: int | None = 0
    eos_token_id: int | None = 0
    pad_token_id: int | None = 0

    @property
    def d_inner(self) -> int:
        """Channels of the scan: expand * d_model."""
        return self.expand * self.hidden_size

    @property
    def dt_rank(self) -> int:
        """Columns of dt in x_proj's product; 'auto' is ceil(d_model / 16)."""
        return math.ceil(self.hidden_size / 16) if self.time_step_rank == "auto" else self.time_step_rank

    @model_validator(mode="after")
    def _consistent(self) -> "MambaConfig":
        given = (self.model_extra or {}).get("intermediate_size")
        if given is not None and given != self.d_inner:
            raise ValueError(f"intermediate_size: expected expand * hidden_size = {self.d_inner}, got {given}")
        if self.time_step_min > self.time_step_max:
            raise ValueError(f"time_step_min {self.time_step_min} is above time_step_max {self.time_step_max}")
        return self


def new_model_config(weights: WeightsConfig, vocab_size: int, end_of_text_id: int) -> MambaConfig:
    """Return the config.json of a model that starts from a seed."""
    shape = weights.model_dump(exclude={"checkpoint", "resize_embeddings", "seed", "time_step_rank"})
    return MambaConfig(
        vocab_size=vocab_size,
        time_step_rank=weights.time_step_rank or "auto",
        bos_token_id=end_of_text_id,
        eos_token_id=end_of_text_id,
        pad_token_id=end_of_text_id,
        **shape,
    )
