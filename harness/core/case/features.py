"""The features of a case: how a recipe is carried out, as opposed to what it computes."""

from __future__ import annotations

from dataclasses import dataclass

ZERO = ("zero1", "zero2", "zero3")
WRAPPERS = ("ddp", "replicate", "fsdp2", "fsdp1", *ZERO)
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

FEATURE_CHOICES: dict[str, tuple[str | None, ...]] = {
    "wrapper": (None, *WRAPPERS),
    "schedule": ("GPipe", "1F1B", *LOOPED),
    "cp_rotation": ("allgather", "alltoall"),
    "fsdp_units": (None, "apart", "root", "observed"),
    "activation_checkpointing": ("none", "full", "layer", "op"),
    "export": (None, "hf", "hf_fused", "hf_interleaved"),
    "reduce_dtype": (None, "float64", "float32", "bfloat16"),
}


THREE_WAY_SWITCHES: dict[str, tuple[bool | str, ...]] = {"defer_sync": (True, False, "all_reduce")}
"""Switches that have a third value."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """How the recipe is carried out. None of it may change a loss or a gradient in exact arithmetic."""

    wrapper: str | None = None
    """Wrapper over the data ranks: ddp, replicate, fsdp1, fsdp2, zero1, zero2 or zero3 (over dp_shard); None: Case.wrapper
    decides."""
    accumulation: int = 1
    """Forward and backward passes per optimizer step; under pp, passes of the schedule."""
    defer_sync: bool | str = True
    """Whether gradients are reduced after the last pass only; "all_reduce": only HSDP's all-reduce over replicas waits.
    What it means is in `defers_every_reduction` and `defers_replica_reduction`."""
    bucket_mb: float | None = None
    """MiB of gradients that DDP and replicate reduce at once; None: torch's default of 25."""
    reshard_after_forward: str | int = "default"
    """Units freed after forward: "default" (all but the last; under pp none), "always", "never", or a number of ranks to stay
    sharded over."""
    cpu_offload: bool = False
    """Whether FSDP keeps parameters on the CPU between uses."""
    sequence_parallel: bool = True
    """Whether tensor parallel also cuts the sequence between its layers."""
    loss_parallel: bool = True
    """Whether the loss is computed on logits that stay cut over tp."""
    async_tp: bool = False
    """Whether tensor parallel overlaps its collectives with matmuls."""
    schedule: str = "1F1B"
    """Pipeline schedule, by torch's name."""
    microbatches: int | None = None
    """Number of parts that the schedule cuts a batch in; None: see Case.microbatches."""
    stages_per_rank: int | None = None
    """Pipeline stages on each rank; None: see Case.stages_per_rank."""
    first_stage_less_layers: int = 0
    """Number of layers by which the first stage has fewer than an even share, since the embedding is work too."""
    last_stage_less_layers: int = 0
    """Number of layers by which the last stage has fewer than an even share, since the output is work too."""
    cp_rotation: str = "allgather"
    """K/V exchange over cp: allgather or alltoall."""
    cp_load_balance: bool = True
    """Whether each cp rank gets an early and a late part of the sequence, so that causal attention is balanced."""
    shards_over_cp: bool = True
    """Whether FSDP2 shards parameters over cp as well; else ranks of cp are replicas."""
    activation_checkpointing: str = "none"
    """Blocks that are recomputed: none, full (every block), layer (every second) or op (all but costly operators)."""
    async_save: bool = False
    """Whether a launch that saves goes on training while its checkpoint is written."""
    compile: bool = False
    """Whether torch.compile compiles each block."""
    reduce_dtype: str | None = None
    """Dtype in which gradients are reduced; None: the dtype in which they are computed."""
    validate_every: int | None = None
    """Number of steps after which held-out samples are evaluated; None: never."""
    export: str | None = None
    """Export after the last step, under Hugging Face's names: "hf" (q and k for a rotary embedding that turns halves),
    "hf_fused" (q, k and v in one matrix, gate and up in one) or "hf_interleaved" (q and k as in the reference); None: none."""
    fsdp_units: str | None = None
    """FSDP2's units, as TrainerTraits names them; "observed": as its wrappers claim; None: the traits decide."""

    @property
    def defers_every_reduction(self) -> bool:
        """Return whether gradients are reduced in a step's last backward pass only, over all data ranks."""
        return self.defer_sync is True

    @property
    def defers_replica_reduction(self) -> bool:
        """Return whether gradients are summed over replicas in a step's last backward pass only.

        False if they are after each microbatch. Over shards they may be reduced more often, see `defers_every_reduction`."""
        return self.defer_sync is not False

    def __post_init__(self) -> None:
        for key in ("accumulation", "microbatches", "stages_per_rank", "validate_every"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        for key in ("first_stage_less_layers", "last_stage_less_layers"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must be at least 0, got {getattr(self, key)}")
        if self.bucket_mb is not None and self.bucket_mb <= 0:
            raise ValueError(f"bucket_mb must be positive, got {self.bucket_mb}")
        policy = self.reshard_after_forward
        if policy not in ("default", "always", "never") and (not isinstance(policy, int) or policy < 2):
            raise ValueError(f"reshard_after_forward {policy!r}: choose default, always, never or a number above 1")
        if self.defer_sync not in THREE_WAY_SWITCHES["defer_sync"]:
            raise ValueError(f"defer_sync {self.defer_sync!r}: choose true, false or all_reduce")
        for key, known in FEATURE_CHOICES.items():
            if getattr(self, key) not in known:
                named = ", ".join("null" if choice is None else choice for choice in known)
                raise ValueError(f"{key} {getattr(self, key)!r}: choose one of {named}")
