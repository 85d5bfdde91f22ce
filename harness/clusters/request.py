"""A production layout as a person types it, as a case: degrees or a job's configuration, a published model, lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.clusters import config_file, nemo, other_files
from harness.clusters.draft import Draft, draft_of_case
from harness.core.case.case import Case, CaseError, to_json
from harness.core.case.layout import parse_layout
from harness.core.case.loading import build_case
from harness.core.case.traits import TrainerTraits
from harness.reference.config import PRESETS

READERS: dict[str, Callable[[str, int | None], Draft]] = {
    ".yaml": other_files.draft_of_yaml,
    ".yml": other_files.draft_of_yaml,
    ".json": other_files.draft_of_deepspeed,
    ".py": nemo.draft_of_recipe,
}
"""End of a file's name -> its reader."""


@dataclass(frozen=True, kw_only=True)
class RequestedLayout:
    """A layout that was requested, as a case."""

    case: Case
    """What is requested."""
    traits: TrainerTraits
    """What the trainer chose that the file is of."""
    set_aside: tuple[str, ...]
    """What of a file is not planned."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A layout as a person types it: degrees or a file in `dims`, and options; None is as in the file, else by default."""

    dims: str
    world: int | None = None
    """Number of ranks, where the file does not say it."""
    model: str | None = None
    """A published size."""
    seq: int | None = None
    """Tokens of a sample."""
    batch: int | None = None
    """Samples of a step over all ranks; None: one a microbatch of each data rank."""
    microbatches: int | None = None
    """Parts that a pipeline cuts a batch in."""
    stages_per_rank: int | None = None
    """Stages of a pipeline on each rank."""
    schedule: str | None = None
    """Schedule of a pipeline."""
    checkpointing: str | None = None
    """Blocks that are recomputed."""
    wrapper: str | None = None
    """Who looks after the data ranks."""
    cp_replicates: bool | None = None
    """Whether FSDP does not shard over cp."""
    steps: int = 1
    """Steps that are trained."""

    def build_case(self) -> Case:
        """Return the case that is requested. Raises CaseError."""
        return self.resolve().case

    def resolve(self) -> RequestedLayout:
        """Return the case, the traits of the trainer that a file is of, and the parts of the file that are not planned.

        Raises CaseError for an unknown or missing model, a file that cannot be read, or a layout that is not valid.
        """
        if self.model is not None and self.model not in PRESETS:
            raise CaseError(f"--model {self.model!r}: choose one of {', '.join(PRESETS)}")
        draft = self._with_options(self._read_draft())
        model = PRESETS[self.model] if self.model else draft.model
        if model is None:
            raise CaseError(f"{self.dims}: the model is missing; add --model, one of {', '.join(PRESETS)}")
        if self.world not in (None, draft.dims.world_size):
            raise CaseError(f"{self.dims}: {draft.dims} = {draft.dims.world_size} ranks, --world says {self.world}")
        try:
            case = draft.build_case(
                model, f"{model.name}_{draft.dims.world_size}", "a layout before a cluster is spent on it"
            )
            case = replace(case, training=replace(case.training, steps=self.steps))
            case = replace(build_case(to_json(case), "--dims"), file="")
        except CaseError:
            raise
        except ValueError as error:
            raise CaseError(f"{self.dims}: {error}") from error
        return RequestedLayout(case=case, traits=draft.traits, set_aside=draft.set_aside)

    def _read_draft(self) -> Draft:
        """Return the draft that the file or the degrees in `dims` define.

        Raises CaseError. Typed degrees have the model "debug".
        """
        path = Path(self.dims.partition(":")[0])
        if path.suffix == ".toml":  # torchtitan's is read as a case
            from_file = config_file.read_titan_file(path, self.world, self.model)
            return draft_of_case(from_file.case, config_file.TITAN_TRAITS, from_file.set_aside)
        if path.suffix in READERS:
            return READERS[path.suffix](self.dims, self.world)
        is_typed = ":" not in self.dims
        model = PRESETS["debug"] if is_typed else None
        return Draft(dims=parse_layout(self.dims, self.world), model=model)

    def _with_options(self, draft: Draft) -> Draft:
        """Return the draft with the options that were typed, which take precedence over a file.

        Several stages per rank without a schedule mean Interleaved1F1B.
        """
        typed_features: dict[str, Any] = {
            "microbatches": self.microbatches,
            "stages_per_rank": self.stages_per_rank,
            "schedule": self.schedule,
            "activation_checkpointing": self.checkpointing,
            "wrapper": self.wrapper,
            "shards_over_cp": False if self.cp_replicates else None,
        }
        features = {**draft.features, **{key: value for key, value in typed_features.items() if value is not None}}
        if (self.stages_per_rank or 1) > 1 and "schedule" not in features:
            features["schedule"] = "Interleaved1F1B"
        typed_sizes = {key: getattr(self, key) for key in ("seq", "batch") if getattr(self, key) is not None}
        return replace(draft, features=features, **typed_sizes)


def layout_of_traces(dims: str, world: int) -> Case:
    """Return the case of a layout, for a job of which only traces are there. dims: degrees, or a file. Raises CaseError."""
    return Request(dims=dims, world=world).resolve().case
