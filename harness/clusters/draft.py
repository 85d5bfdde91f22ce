"""A draft of a layout, from a configuration file or typed degrees, before options are added and it becomes a case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.traits import USUAL_TRAITS, TrainerTraits
from harness.reference.config import ModelConfig, TrainingConfig

LLAMA_3 = TrainingConfig(dtype="float32", compute_dtype="bfloat16")
"""Its precision; gradients are reduced in float32."""
DEFAULT_LENGTH = 8192
"""Tokens of a sample where a file does not say it."""
PLANNED_DTYPES = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "bfloat16"}
"""Dtypes of configurations, by what is planned for them: of fp16 the sizes are the same, and fp8 is of matmuls alone."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The parts of a layout that a file or a person defines; None where it is not defined."""

    dims: ParallelDims
    """Degrees of the layout."""
    model: ModelConfig | None = None
    """Sizes of the model."""
    seq: int | None = None
    """Tokens of a sample."""
    batch: int | None = None
    """Samples of a step over all ranks."""
    local_batch: int = 1
    """Samples of a microbatch on a data rank, where `batch` is not said."""
    training: Mapping[str, Any] = field(default_factory=lambda: {"dtype": "float32", "compute_dtype": "bfloat16"})
    """Other fields of the recipe."""
    features: Mapping[str, Any] = field(default_factory=lambda: {"reduce_dtype": "float32"})
    """Fields of Features."""
    traits: TrainerTraits = USUAL_TRAITS
    """Traits of the trainer that the file is of."""
    set_aside: tuple[str, ...] = ()
    """What of the file is not planned."""

    def build_case(self, model: ModelConfig, name: str, why: str) -> Case:
        """Return the case of one step, not validated yet.

        ValueError if data ranks and microbatches do not divide the batch.
        """
        features = Features(**self.features)
        bare = Case(name=name, why=why, dims=self.dims, model=model, features=features)
        samples_of_microbatches = self.dims.dp * features.accumulation * bare.microbatches
        if self.batch is not None and self.batch % samples_of_microbatches:
            shares = f"{self.dims.dp} data ranks x {bare.microbatches * features.accumulation} microbatches"
            raise ValueError(f"{self.batch} samples of a step: {shares} do not divide it")
        sizes = {
            "seq_len": self.seq or DEFAULT_LENGTH,
            "global_batch": self.batch or samples_of_microbatches * self.local_batch,
        }
        return replace(bare, training=TrainingConfig(**{**self.training, "steps": 1, **sizes}))


def draft_of_case(case: Case, traits: TrainerTraits, set_aside: tuple[str, ...]) -> Draft:
    """Return a case as a draft, with these traits and set-aside parts of its file.

    Options left at their default are left out.
    """
    training = {key: getattr(case.training, key) for key in ("dtype", "compute_dtype", "max_norm")}
    usual = Features()
    features = {key: value for key, value in vars(case.features).items() if value != getattr(usual, key)}
    return Draft(
        dims=case.dims,
        model=case.model,
        seq=case.training.seq_len,
        batch=case.training.global_batch,
        training=training,
        features=features,
        traits=traits,
        set_aside=set_aside,
    )
