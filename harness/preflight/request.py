"""A production layout as a person types it, as a case: degrees, a published model, a length of sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.reference.config import PRESETS, TrainingConfig
from harness.spec.case import Case, CaseError, to_json
from harness.spec.features import Features
from harness.spec.layout import layout
from harness.spec.loading import built_case

LLAMA_3 = TrainingConfig(dtype="float32", compute_dtype="bfloat16")
"""Its precision; gradients are reduced in float32."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """batch: samples of a step over all ranks; None: one a microbatch of each data rank."""

    dims: str
    model: str = "debug"
    seq: int = 8192
    batch: int | None = None
    microbatches: int | None = None
    schedule: str = "1F1B"
    checkpointing: str = "none"
    steps: int = 1

    def case(self) -> Case:
        """Raises CaseError."""
        if self.model not in PRESETS:
            raise CaseError(f"--model {self.model!r}: choose one of {', '.join(PRESETS)}")
        dims = layout(self.dims, 1)
        microbatches = (self.microbatches or 2 * dims.pp) if dims.pp > 1 else 1
        whole = dims.dp * microbatches
        if self.batch is not None and self.batch % whole:
            raise CaseError(
                f"--batch {self.batch}: {dims.dp} data ranks x {microbatches} microbatches do not divide it"
            )
        try:
            case = Case(
                name=f"{self.model}_{dims.world_size}",
                why="a layout before a cluster is spent on it",
                dims=dims,
                model=PRESETS[self.model],
                training=replace(LLAMA_3, seq_len=self.seq, global_batch=self.batch or whole, steps=self.steps),
                features=Features(
                    microbatches=microbatches if dims.pp > 1 else None,
                    schedule=self.schedule,
                    activation_checkpointing=self.checkpointing,
                    reduce_dtype="float32",
                ),
            )
            return replace(built_case(to_json(case), "--dims"), file="")
        except CaseError:
            raise
        except ValueError as error:
            raise CaseError(str(error)) from error
