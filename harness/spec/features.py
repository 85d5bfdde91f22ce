"""How a recipe is carried out, as opposed to what it computes."""

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
    "reduce_dtype": (None, "float64", "float32", "bfloat16"),
}


@dataclass(frozen=True, kw_only=True)
class Features:
    """How the recipe is carried out. None of it may change a loss or a gradient in exact arithmetic.

    wrapper: who divides parameters or reduces gradients over the data ranks; None: Case.wrapper decides. zero1, zero2, zero3:
    ZeRO over the dp_shard ranks, of optimizer state alone, of gradients too, of parameters too, each cut as flat vectors.
    accumulation: forward and backward passes (under pp: passes of the schedule) per optimizer step. defer_sync: gradients
    are reduced over the data ranks after the last of them only, rather than after each; "all_reduce": of HSDP only the
    all-reduce over replicas waits (FSDP2's set_requires_all_reduce).
    bucket_mb: how many MiB of gradients DDP and replicate reduce at once; None: torch's usual 25.
    reshard_after_forward: "default" (all but the last unit; under pp none), "always", "never", or over how many ranks a
    unit stays sharded. reduce_dtype: of gradients on their way; None: as they are computed.
    schedule, microbatches, stages_per_rank: of a pipeline; None: see Case. first_stage_less_layers, last_stage_less_layers: by
    how many the first and the last stage have fewer than an even share, for embedding and output are work too (torchtitan's
    words; in Llama 3 405B 1 and 1). cp_rotation: the K/V exchange over cp.
    activation_checkpointing: of every block ("full"), of every second ("layer"), of all but the costly operators ("op").
    compile: torch.compile for each block. fsdp_units: what FSDP2 gathers together besides each block, as TrainerTraits names
    it; "observed", whatever the trainer wraps; None: its traits say which.
    """

    wrapper: str | None = None
    accumulation: int = 1
    defer_sync: bool | str = True
    bucket_mb: float | None = None
    reshard_after_forward: str | int = "default"
    cpu_offload: bool = False
    sequence_parallel: bool = True
    loss_parallel: bool = True
    async_tp: bool = False
    schedule: str = "1F1B"
    microbatches: int | None = None
    stages_per_rank: int | None = None
    first_stage_less_layers: int = 0
    last_stage_less_layers: int = 0
    cp_rotation: str = "allgather"
    cp_load_balance: bool = True
    activation_checkpointing: str = "none"
    compile: bool = False
    reduce_dtype: str | None = None
    fsdp_units: str | None = None

    def __post_init__(self) -> None:
        for key in ("accumulation", "microbatches", "stages_per_rank"):
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
        if self.defer_sync not in (True, False, "all_reduce"):
            raise ValueError(f"defer_sync {self.defer_sync!r}: choose true, false or all_reduce")
        for key, known in FEATURE_CHOICES.items():
            if getattr(self, key) not in known:
                named = ", ".join("null" if choice is None else choice for choice in known)
                raise ValueError(f"{key} {getattr(self, key)!r}: choose one of {named}")
