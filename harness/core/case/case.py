"""One row of the matrix: what is requested of a trainer, and of the launches that it resumes from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from harness.core.case.allowance import Allowance
from harness.core.case.dims import CpReplicates, ParallelDims
from harness.core.case.features import LOOPED, Features
from harness.reference.config import ModelConfig, TrainingConfig, noise_key


class CaseError(ValueError):
    """A case requests something that does not exist or does not fit. The message is for the person who wrote it."""


TIERS = ("default", "nightly", "compiled")


@dataclass(frozen=True, kw_only=True)
class ExpectedFailure:
    """A case that torch gets wrong. It must fail in just this way; if it does not, the entry is outdated."""

    because: str = ""
    """What is wrong, and where that is reported."""
    script: str = ""
    """Path of a minimal program that shows it without the harness."""
    checks: str = ""
    """Names of the checks that fail, separated by blanks."""
    named: str = ""
    """The kind of a cause that the diagnosis names, of docs/causes.md."""
    raised: str = ""
    """Part of the error that ended a rank; empty where none ends so."""
    torch: str = ""
    """Releases that get it wrong, such as "<2.15"; empty for all. Other releases are judged as usual."""


@dataclass(frozen=True)
class Saved:
    """An earlier launch, which saved a checkpoint that a later one continues."""

    after: int
    """Step that it saved after."""
    dims: ParallelDims = ParallelDims()
    """Degrees of its layout."""
    features: Features = Features()
    """How it carried out the recipe."""
    until: int | None = None
    """Step that it went on to before it was lost; None if it ended with the checkpoint."""
    cut_short: bool = False
    """Whether it was lost while it saved once more, after step `until`. That checkpoint is incomplete: its index is missing."""
    model_only: bool = False
    """Whether the later launch reads the weights alone. Its optimizer, schedule and data begin anew, and so do its steps."""

    def __post_init__(self) -> None:
        if self.after < 1:
            raise ValueError(f"after must be at least 1, got {self.after}")
        if self.until is not None and self.until <= self.after:
            raise ValueError(f"until must be above after {self.after}, got {self.until}")
        if self.cut_short and self.until is None:
            raise ValueError("cut_short needs until: the step after which the interrupted save begins")


@dataclass(frozen=True)
class Case:
    """One row of the matrix."""

    name: str
    """Name, unique among all cases."""
    why: str
    """What the case is there for, in one sentence."""
    dims: ParallelDims = ParallelDims()
    """Degrees of the layout of the last launch."""
    model: ModelConfig = ModelConfig()
    """Sizes of the model."""
    training: TrainingConfig = TrainingConfig()
    """Recipe: what is computed."""
    features: Features = Features()
    """How the last launch carries out the recipe."""
    runs: int = 1
    """Number of times that the case runs; with 2 the check `determinism` compares both."""
    tier: str = "default"
    """When it runs: default (before every push), nightly (larger and rarer combinations) or compiled (it waits for a
    compiler)."""
    expected_failure: ExpectedFailure | None = None
    """What torch gets wrong in it; None for most."""
    resume: tuple[Saved, ...] = ()
    """Earlier launches that this one continues, in order."""
    last_step: int | None = None
    """Last step of an earlier launch; None for the last launch. Never written in a file."""
    saves_after: int | None = None
    """Step that an earlier launch saves after, if it is not its last. Never written in a file."""
    cut_short: bool = False
    """Whether an earlier launch saves once more at its end, of which the index is lost. Never written in a file."""
    file: str = ""
    """Path of the YAML file; empty for a case of no file."""
    allow: tuple[Allowance, ...] = ()
    """What the trainer may retain, copy, move or compute beyond the plan, each with its reason."""
    traits: tuple[tuple[str, Any], ...] = ()
    """Traits of the trainer by name that hold in this case, whatever its adapter says."""

    is_complete: ClassVar[bool] = True
    """Whether recipe, features and steps are requested. A class of its own says False where only the layout is requested, and
    the rest is what was observed."""

    @property
    def steps(self) -> range:
        """Return the steps that this launch trains, counted on from the step after which the launch before saved.

        A start from the seed, or from weights alone, counts from 1.
        """
        first = self.resume[-1].after + 1 if self.resume and self.model_of is None else 1
        return range(first, (self.last_step or self.training.steps) + 1)

    @property
    def model_of(self) -> int | None:
        """Return the step after which an earlier launch saved the weights that this one starts from.

        It takes nothing else from that launch. None for all launches that do not start from weights alone.
        """
        return self.resume[-1].after if self.resume and self.resume[-1].model_only else None

    @property
    def first_launch(self) -> Case:
        """Return the first launch, whose weights are the seed's."""
        return next(iter(self.launches.values()))

    @property
    def saved_step(self) -> int | None:
        """Return the step after which this launch saves. None if it saves nothing."""
        return self.saves_after or self.last_step

    @property
    def launches(self) -> dict[str, Case]:
        """Return all launches by folder name: the earlier ones as saved_1, saved_2, .., each as a case, then this one
        as run."""
        earlier = {
            f"saved_{number}": dataclasses.replace(
                self,
                dims=saved.dims,
                features=saved.features,
                resume=self.resume[: number - 1],
                last_step=saved.until or saved.after,
                saves_after=saved.until and saved.after,
                cut_short=saved.cut_short,
                runs=1,
            )
            for number, saved in enumerate(self.resume, start=1)
        }
        return earlier | {"run": self}

    @property
    def local_batch(self) -> int:
        """Return the number of samples in one microbatch of one rank."""
        return self.training.global_batch // (self.dims.dp * self.features.accumulation * self.microbatches)

    @property
    def microbatches(self) -> int:
        """Return how many parts a pipeline's schedule cuts a batch in: by default twice the degree of pp. 1 without pp."""
        if self.dims.pp == 1:
            return 1
        return self.features.microbatches or 2 * self.dims.pp

    @property
    def passes(self) -> int:
        """Return the number of forward passes per optimizer step on a rank."""
        return self.features.accumulation * self.microbatches

    @property
    def stages_per_rank(self) -> int:
        """Return the number of pipeline stages on each rank: as requested, else 2 for a looped schedule, else 1. 1
        without pp."""
        if self.dims.pp == 1:
            return 1
        return self.features.stages_per_rank or (2 if self.features.schedule in LOOPED else 1)

    @property
    def n_stages(self) -> int:
        return self.dims.pp * self.stages_per_rank

    @property
    def wrapper(self) -> str | None:
        """Return the wrapper over the data ranks: the requested one, else FSDP2 where parameters are sharded, else DDP.

        None without data parallelism. Context parallel counts as sharding: its ranks hold equal parameters and
        different tokens.
        """
        if self.features.wrapper is not None:
            return self.features.wrapper
        if self.dims.dp_shard * self.dims.cp > 1:
            return "fsdp2"
        return "ddp" if self.dims.dp_replicate > 1 else None

    @property
    def shards(self) -> int:
        """Return over how many ranks FSDP or ZeRO-3 cuts a parameter. ZeRO-1 and 2 leave it whole."""
        return 1 if self.wrapper in ("zero1", "zero2") else self.data_dims.shards

    @property
    def data_dims(self) -> ParallelDims:
        """Return the degrees by which parameters lie on the ranks: `dims`, with two exceptions.

        If features do not shard over cp, they are the same degrees as CpReplicates. DDP and replicate shard over
        nothing, so that cp becomes a part of dp_replicate and is 1 itself. There dp_shard is 1, and folding both
        changes no rank's mesh coordinate.
        """
        if not self.features.shards_over_cp:
            return CpReplicates(*self.dims.degrees)
        if self.wrapper not in ("ddp", "replicate") or self.dims.cp == 1:
            return self.dims
        return dataclasses.replace(self.dims, dp_replicate=self.dims.dp_replicate * self.dims.cp, cp=1)

    @property
    def replicate_axis(self) -> str:
        """Return the axis over which replicas reduce their gradients: "dp_replicate" if cp ranks are shards or cp is 1.

        Else ranks of cp are replicas as well: "cp" if dp_replicate is 1, or "dp_replicate_cp", both joined.
        """
        if self.data_dims == self.dims:
            return "dp_replicate"
        return "cp" if self.dims.dp_replicate == 1 else "dp_replicate_cp"

    def seq_len(self, step: int) -> int:
        """Return the number of tokens of each sample that a step trains on: with variable length, half as many in steps
        2, 4, .."""
        if self.training.variable_length and step % 2 == 0:
            return self.training.seq_len // 2
        return self.training.seq_len

    def with_batch_of_step(self, step: int) -> Case:
        """Return the case as it is in a step. Only the last step of a recipe with `last_batch` differs from the case
        itself.

        It has fewer samples, in fewer or in smaller microbatches.
        """
        if self.training.last_batch is None or step != self.training.steps:
            return self
        full_microbatches = self.training.last_batch // (self.dims.dp * self.local_batch)
        training = dataclasses.replace(self.training, global_batch=self.training.last_batch, last_batch=None)
        return dataclasses.replace(
            self, training=training, features=dataclasses.replace(self.features, accumulation=max(1, full_microbatches))
        )

    def microbatch_sizes(self, step: int, share: int) -> tuple[int, ...]:
        """Return the number of samples in each microbatch of a step on a data rank. share: the data rank, counted from 0.

        A last batch that is not divided evenly is one microbatch. There the first ranks have one sample more, and some
        may have none.
        """
        case_of_step = self.with_batch_of_step(step)
        total = case_of_step.training.global_batch
        ranks = case_of_step.dims.dp
        if total % ranks:
            return (len(range(share, total, ranks)),)
        return (case_of_step.local_batch,) * case_of_step.passes

    @property
    def noise_key(self) -> str:
        """Return the key that the reference's noise is kept under.

        It says how gradients are added over ranks, and whether matmuls are rounded as on one device.
        """
        cut = self.dims.tp * self.dims.cp > 1 or self.features.compile
        return noise_key(self.training, self.features.reduce_dtype, "parts" if cut else "shares")

    @property
    def golden_noise_key(self) -> str:
        """Return the key that the noise of the reference itself is kept under: another build's kernels may sum in any order."""
        return noise_key(self.training, self.features.reduce_dtype, "parts")

    @property
    def has_derived_bounds(self) -> bool:
        """Return whether derived float64 bounds judge the case, rather than a bound measured from the reference's own noise."""
        narrow = {self.training.compute_dtype, self.features.reduce_dtype} - {None, "float64"}
        return self.training.dtype == "float64" and not narrow and not self.training.quantize


def to_json(case: Case) -> dict[str, Any]:
    return dataclasses.asdict(case) | {"traits": dict(case.traits)}
