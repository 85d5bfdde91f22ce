"""The model's shape and the training recipe. Nothing here depends on how the work is divided among ranks."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's rescaling of the rotary frequencies (Llama 3 herd of models, section 3.4.2; Meta's `apply_scaling`)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        """Raise ValueError for values that are not positive and finite, or a low_freq_factor that is not below
        high_freq_factor."""
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position"):
            if not 0 < getattr(self, key) < math.inf:
                raise ValueError(f"{key} must be positive and finite, got {getattr(self, key)}")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} must be below high_freq_factor {self.high_freq_factor}"
            )


MATRICES = {
    **dict.fromkeys(("wq", "wk", "wv", "wo"), "attention"),
    **dict.fromkeys(("w1", "w2", "w3"), "feed_forward"),
}
"""Matrices of a block, with the module that each is in."""


@dataclass(frozen=True)
class Lora:
    """Adapters of low rank: a target W [m, n] counts as W + alpha / rank * B A, with A [rank, n] and B [m, rank].

    B begins at zero. Which parameters are trained is said by the recipe's `trainable`.
    """

    rank: int = 4
    alpha: float = 8.0
    targets: tuple[str, ...] = ("wq", "wv")

    def __post_init__(self) -> None:
        """Raise ValueError for a rank below 1, an alpha that is not positive and finite, or targets that are unknown or
        repeated."""
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise ValueError(f"rank must be at least 1 and alpha positive, got rank {self.rank}, alpha {self.alpha}")
        if not self.targets or not {*self.targets} <= {*MATRICES} or len({*self.targets}) < len(self.targets):
            raise ValueError(f"targets {list(self.targets)}: choose some of {', '.join(MATRICES)}, each once")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def shapes(self, fqn: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a parameter's adapter, A before B, by fqn. Empty if the parameter is no target.

        fqn, shape: of the parameter.
        """
        module = fqn.removesuffix(".weight")
        if module.rpartition(".")[2] not in self.targets:
            return {}
        return {f"{module}.lora_a.weight": (self.rank, shape[1]), f"{module}.lora_b.weight": (shape[0], self.rank)}


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
    lora: Lora | None = None

    def __post_init__(self) -> None:
        if self.dim % self.n_heads:
            raise ValueError(f"dim {self.dim} is not divisible by n_heads {self.n_heads}: it is n_heads * head_dim")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}: each serves equally many"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} (dim / n_heads) must be even: rotary embedding turns pairs")
        for key in ("norm_eps", "rope_theta"):
            if not 0 < getattr(self, key) < math.inf:  # NaN is in no range
                raise ValueError(f"{key} must be positive and finite, got {getattr(self, key)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @functools.cached_property
    def numel(self) -> int:
        """Return the number of entries of all parameters together."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the full shape of every parameter by its name, in Meta's spelling and in the order of the model."""
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
        if self.lora is None:
            return shapes
        with_adapters: dict[str, tuple[int, ...]] = {}
        for fqn, shape in shapes.items():
            with_adapters |= {fqn: shape} | self.lora.shapes(fqn, shape)
        return with_adapters


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
    "optimizer": ("adamw", "sgd", "muon"),
    "dtype": DTYPES,
    "compute_dtype": (None, *DTYPES),
    "quantize": (None, *QUANTIZED),
    "decay": ("all", "matrices"),
    "muon_matrices": ("blocks", "all"),
    "adjust_lr": ("original", "match_rms_adamw"),
}


RULES: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "adamw": ("beta1", "beta2", "eps"),
    "muon": ("momentum", "nesterov", "adjust_lr", "muon_matrices"),
}
"""By rule of an optimizer, the fields of the recipe that it takes beside the rate and the weight decay."""


@dataclass(frozen=True)
class TrainingConfig:
    """The recipe. The same recipe, on any layout, must give the same losses and gradients.

    The learning rate rises linearly over `warmup_steps`, then follows a cosine down to `final_lr_fraction * lr` at `steps`.
    """

    steps: int = 3
    seed: int = 1234
    dtype: str = "float64"  # of parameters, activations and optimizer state
    global_batch: int = 16  # samples per optimizer step, over all ranks and microbatches
    seq_len: int = 32  # tokens per sample
    optimizer: str = "adamw"  # "muon": Muon steps matrices, AdamW all else (reference/muon.py)
    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 2
    final_lr_fraction: float = 0.1
    max_norm: float | None = 1.0  # None: no clipping
    data: str | None = None  # a file of tokens; None: the dataset made from `seed`
    compute_dtype: str | None = None  # what parameters are cast to in forward and backward; None: not cast
    quantize: str | None = None  # the format of the blocks' matmuls, by torchao
    tf32: bool = False
    """GPUs may round the operands of float32 matmuls to TF32, 10 bits of mantissa (torch's
    `set_float32_matmul_precision("high")`); CPUs do not."""
    variable_length: bool = False  # even steps train on the first half of each sample's tokens
    document_mask: bool = False
    """Attention does not look past a separator. Positions count on from the row's first token: rotary attention sees distances
    only, so starting anew in each document would be the same."""
    masked_samples: bool = False  # every fourth sample drawn has no valid label at all
    all_valid: bool = False  # no label is masked, so that the mean of the ranks' means is the mean
    last_batch: int | None = None  # samples of the last step, if an epoch ends there with fewer than global_batch
    decay: str = "all"  # or "matrices": norm weights are not decayed
    momentum: float = 0.95  # of Muon
    nesterov: bool = True  # whether Muon looks ahead
    adjust_lr: str = "original"  # how Muon scales a matrix by its shape (reference/muon.py)
    muon_matrices: str = "blocks"  # those of attention and feed-forward; or "all", with embedding and output
    trainable: tuple[str, ...] = ("*",)
    """Patterns of names, as a shell's. A parameter that none fits is frozen: no gradient, no state, no weight decay."""
    rates: tuple[float, ...] | None = None
    """Learning rates by step, of a trainer whose own schedule is not under test; None: warm-up and cosine."""

    @property
    def made_samples(self) -> int:
        """Return the number of samples of the dataset that is made from the seed.

        With last_batch, it ends with the recipe.
        """
        if self.last_batch is None:
            return STEPS_PER_EPOCH * self.global_batch
        return (self.steps - 1) * self.global_batch + self.last_batch

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
            ("momentum", 0, 1),
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
        if self.max_norm is not None and not 0 < self.max_norm < math.inf:
            raise ValueError(f"max_norm must be positive, or null for no clipping, got {self.max_norm}")
        if self.variable_length and self.seq_len % 2:
            raise ValueError(f"variable_length trains on half of each sample: seq_len must be even, got {self.seq_len}")
        if self.masked_samples and self.all_valid:
            raise ValueError("masked_samples and all_valid contradict each other; leave out one")
        if self.last_batch is not None and not 0 < self.last_batch < self.global_batch:
            raise ValueError(
                f"last_batch {self.last_batch}: above 0 and below global_batch {self.global_batch} is wanted"
            )
        if self.last_batch is not None and self.data is not None:
            raise ValueError("last_batch: of a token file all batches are whole; leave out one of it and data")
        if self.masked_samples and self.data is not None:
            raise ValueError("masked_samples: no label of a token file is masked; leave out one of it and data")


def is_trainable(training: TrainingConfig, fqn: str) -> bool:
    """Return whether a parameter is trained; else it is frozen."""
    return any(fnmatchcase(fqn, pattern) for pattern in training.trainable)


def rule_of(training: TrainingConfig, fqn: str) -> str:
    """Return the name of the rule of RULES that updates a parameter: "sgd", "adamw" or "muon".

    The parameter's name decides, not its dims: a wrapper may flatten a matrix. It may also put words before the name.
    """
    vector = fqn.endswith("norm.weight")
    block = ".layers." in f".{fqn}"
    if training.optimizer != "muon" or (not vector and (block or training.muon_matrices == "all")):
        return training.optimizer
    return "adamw"


def unused_fields(training: TrainingConfig) -> set[str]:
    """Return the names of the recipe's fields that only other optimizers than its own use."""
    used_rules = {training.optimizer}
    if training.optimizer == "muon":
        used_rules.add("adamw")
    fields: set[str] = set()
    for rule, names in RULES.items():
        if rule not in used_rules:
            fields.update(names)
    return fields


def quantized_modules(model: ModelConfig) -> tuple[str, ...]:
    """Return the fqns of the modules whose matmuls run in 8 bits if a recipe has `quantize`: every nn.Linear of every block.

    The output is not one, for no later layer evens out its errors: the rule of torchao's and torchtitan's float8
    recipes.
    """
    modules = []
    for fqn, shape in model.parameter_shapes().items():
        if fqn.startswith("layers.") and len(shape) == 2:
            modules.append(fqn.removesuffix(".weight"))
    return tuple(modules)


def noise_key(training: TrainingConfig, reduce_dtype: str | None, kind: str) -> str:
    """Return the key of the reference's noise (reference/noise.py): "float32 shares".

    reduce_dtype: in which gradients are added over ranks; None means as they are computed. kind: "shares" or "parts".
    """
    return f"{reduce_dtype or training.compute_dtype or training.dtype} {kind}"
