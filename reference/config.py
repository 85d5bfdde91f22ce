"""What to compute: the model's shape and the training recipe. Nothing here says how it is spread over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's rescaling of the rotary frequencies (Llama 3 herd of models, section 3.4.2; Meta's `apply_scaling`)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama 3 model. `ffn_dim` is SwiGLU's inner width, spelled out instead of derived from a multiplier.

    dropout: no part of Llama 3, for debugging only: the probability with which an entry of what attention and feed-forward
    add to the residual stream is zeroed.
    """

    name: str = "debug"
    dim: int = 64
    n_layers: int = 2
    n_heads: int = 8
    n_kv_heads: int = 4
    vocab_size: int = 256
    ffn_dim: int = 192
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.dim % self.n_heads:
            raise ValueError(f"dim {self.dim} is not divisible by n_heads {self.n_heads}: it is n_heads * head_dim")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}: each serves equally many"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} (dim / n_heads) must be even: rotary embedding turns pairs")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name, in Meta's spelling and in the order the model registers them, and its full shape."""
        kv_dim = self.n_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (self.vocab_size, self.dim)}
        for layer in range(self.n_layers):
            prefix = f"layers.{layer}."
            shapes |= {
                prefix + "attention.wq.weight": (self.dim, self.dim),
                prefix + "attention.wk.weight": (kv_dim, self.dim),
                prefix + "attention.wv.weight": (kv_dim, self.dim),
                prefix + "attention.wo.weight": (self.dim, self.dim),
                prefix + "feed_forward.w1.weight": (self.ffn_dim, self.dim),
                prefix + "feed_forward.w2.weight": (self.dim, self.ffn_dim),
                prefix + "feed_forward.w3.weight": (self.ffn_dim, self.dim),
                prefix + "attention_norm.weight": (self.dim,),
                prefix + "ffn_norm.weight": (self.dim,),
            }
        shapes["norm.weight"] = (self.dim,)
        if not self.tied_embeddings:
            shapes["output.weight"] = (self.vocab_size, self.dim)
        return shapes


_LLAMA_31 = RopeScaling(factor=8.0)
_LLAMA_32 = RopeScaling(factor=32.0)

PRESETS: dict[str, ModelConfig] = {
    "debug": ModelConfig(),
    # Published shapes: Llama 3.2 1B and 3B, Llama 3.1 8B, 70B and 405B (params.json of Meta's releases).
    "1B": ModelConfig("1B", 2048, 16, 32, 8, 128_256, 8192, rope_scaling=_LLAMA_32, tied_embeddings=True),
    "3B": ModelConfig("3B", 3072, 28, 24, 8, 128_256, 8192, rope_scaling=_LLAMA_32, tied_embeddings=True),
    "8B": ModelConfig("8B", 4096, 32, 32, 8, 128_256, 14336, rope_scaling=_LLAMA_31),
    "70B": ModelConfig("70B", 8192, 80, 64, 8, 128_256, 28672, rope_scaling=_LLAMA_31),
    "405B": ModelConfig("405B", 16384, 126, 128, 8, 128_256, 53248, rope_scaling=_LLAMA_31),
}


STEPS_PER_EPOCH = 64  # of the dataset that is made from a seed
DTYPES = ("float64", "float32", "bfloat16")
QUANTIZED = ("float8_tensorwise", "float8_rowwise", "float8_rowwise_with_gw_hp", "mxfp8")
CHOICES: dict[str, tuple[str | None, ...]] = {
    "optimizer": ("adamw", "sgd"),
    "dtype": DTYPES,
    "compute_dtype": (None, *DTYPES),
    "quantize": (None, *QUANTIZED),
    "decay": ("all", "matrices"),
}


@dataclass(frozen=True)
class TrainingConfig:
    """The recipe. The same recipe, on any layout, must give the same losses and gradients.

    `dtype` is the dtype of parameters, activations and optimizer state. `global_batch` counts samples per optimizer
    step over all ranks and microbatches; `seq_len` counts tokens per sample. The learning rate rises linearly over
    `warmup_steps`, then follows a cosine down to `final_lr_fraction * lr` at `steps`. `max_norm` None means no
    clipping. `data` names a file of tokens; None means the dataset made from `seed`.

    `compute_dtype`: what parameters are cast to for forward and backward; None leaves them as they are. `quantize`: the
    format of the blocks' matmuls, by torchao. `tf32`: GPUs may round the operands of float32 matmuls to TF32, 10 bits of
    mantissa (torch's `set_float32_matmul_precision("high")`); CPUs do not. `variable_length`: even steps train on the first
    half of each sample's tokens. `document_mask`: attention does not look past a separator; positions count on from the
    row's first token (rotary attention sees distances only, so starting anew in each document would be the same).
    `masked_samples`: every fourth sample drawn has no valid label at all. `all_valid`: no label is masked, so that the mean
    of the ranks' means is the mean. `decay`: "all", or "matrices" for a weight
    decay that leaves norm weights alone. `rates`: the learning rate of each step, of a trainer that keeps its own schedule,
    which then is not under test; None: warm-up and cosine.
    """

    steps: int = 3
    seed: int = 1234
    dtype: str = "float64"
    global_batch: int = 16
    seq_len: int = 32
    optimizer: str = "adamw"
    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 2
    final_lr_fraction: float = 0.1
    max_norm: float | None = 1.0
    data: str | None = None
    compute_dtype: str | None = None
    quantize: str | None = None
    tf32: bool = False
    variable_length: bool = False
    document_mask: bool = False
    masked_samples: bool = False
    all_valid: bool = False
    decay: str = "all"
    rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for key, known in CHOICES.items():
            if getattr(self, key) not in known:
                named = ", ".join("null" if choice is None else choice for choice in known)
                raise ValueError(f"{key} {getattr(self, key)!r}: choose one of {named}")
        if self.tf32 and "float32" not in (self.compute_dtype or self.dtype, self.quantize and self.dtype):
            raise ValueError("tf32 is a way to multiply float32, of which this recipe multiplies none; leave it out")
        for key in ("steps", "global_batch", "seq_len"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        for key, least, below in (
            ("lr", 0, math.inf),
            ("beta1", 0, 1),
            ("beta2", 0, 1),
            ("eps", 0, math.inf),
            ("weight_decay", 0, math.inf),
            ("warmup_steps", 0, math.inf),
            ("final_lr_fraction", 0, math.inf),
        ):
            if not least <= getattr(self, key) < below:  # NaN is in no range
                raise ValueError(f"{key} must be at least {least} and below {below}, got {getattr(self, key)}")
        if self.rates is not None and (len(self.rates) < self.steps or not all(0 <= r < math.inf for r in self.rates)):
            raise ValueError(
                f"rates: one of at least 0 is needed for each of {self.steps} steps, got {list(self.rates)}"
            )
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_norm must be positive, or null for no clipping, got {self.max_norm}")
        if self.variable_length and self.seq_len % 2:
            raise ValueError(f"variable_length trains on half of each sample: seq_len must be even, got {self.seq_len}")
        if self.masked_samples and self.all_valid:
            raise ValueError("masked_samples and all_valid contradict each other; leave out one")
        if self.masked_samples and self.data is not None:
            raise ValueError("masked_samples: no label of a token file is masked; leave out one of it and data")


def quantized_modules(model: ModelConfig) -> tuple[str, ...]:
    """The modules whose matmuls a recipe with `quantize` runs in 8 bits: every nn.Linear of every block.

    Not the output, whose errors no later layer evens out: the rule of torchao's and torchtitan's float8 recipes.
    """
    shapes = model.parameter_shapes()
    return tuple(
        f.removesuffix(".weight") for f, shape in shapes.items() if f.startswith("layers.") and len(shape) == 2
    )


def noise_key(training: TrainingConfig, reduce_dtype: str | None, kind: str) -> str:
    """Under which the reference's noise is kept (reference/noise.py): "float32 shares".

    reduce_dtype: in which gradients are added over ranks; None is as they are computed. kind: "shares" or "parts".
    """
    return f"{reduce_dtype or training.compute_dtype or training.dtype} {kind}"
