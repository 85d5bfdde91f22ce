"""The input of the checks: the case, its plan, the evidence of the ranks, and the reference's.

From here on nothing has effects: a Trial is stored evidence, and what is derived from it is pure arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.core.case.allowance import Allowance
from harness.core.case.case import Case
from harness.core.case.traits import TrainerTraits
from harness.core.evidence.provided import Provided
from harness.core.evidence.records import RankEvidence, Run
from harness.core.evidence.step import StepEvidence
from harness.core.evidence.summary import Summary
from harness.core.evidence.unplaced import unplaced_groups_reason
from harness.core.judge import tolerance
from harness.core.judge.assumed import AS_REQUESTED, AssumedOptimizer, Assumption
from harness.core.judge.claims import claimed_slice
from harness.core.judge.contents import find_slice
from harness.core.judge.golden import Golden
from harness.core.judge.held_values import whole_weights_after
from harness.core.judge.tolerance import Bounds
from harness.core.plan.grid import groups_along
from harness.core.plan.plan import Plan
from harness.core.plan.slices import Slice
from harness.reference.record import ReferenceRun, ReferenceStep


@dataclass(frozen=True)
class Trial:
    """One launch of a case, with all that checks may look at."""

    case: Case
    """What is requested of this launch."""
    plan: Plan
    """What must be true, by case and traits."""
    run: Run
    """What the ranks of this launch left."""
    reference: ReferenceRun
    """The same training on one device, in all steps: it never stopped. If the launch starts from weights alone, it begins
    with those of the earlier reference. Empty for a recording and for ranks alone."""
    repeat: Run | None = None
    """The second run of the same launch; None where the case requests one."""
    golden: Golden | None = None
    """The accepted curves of this recipe; None where there are none."""
    golden_problem: str = ""
    """Why the golden could not be read; empty where it could, or where none is needed."""
    saved: tuple[Trial, ...] = ()
    """The earlier launches whose checkpoints this one continues, in their order."""
    assumption: Assumption = AS_REQUESTED
    """What a hypothesis assumes that is put to the test."""

    @property
    def provided(self) -> Provided:
        """Return the kinds of evidence that checks can use, with the reason for each that is missing.

        Most are missing if a rank or step is, and the members of groups if torch lists no ranks of some.
        """
        provided = self.run.provided
        if reason := unplaced_groups_reason({rank: evidence.own_groups for rank, evidence in self.ranks.items()}):
            provided = provided.lacking_words(("members",), reason, unknown=True)
        missing = self._missing_evidence
        return provided.without_complete_evidence(f"no evidence {missing}; see `completed`") if missing else provided

    @property
    def has_claims_or_contents(self) -> bool:
        """Return whether claims, slices or contents show what ranks hold; otherwise only traffic does."""
        return any(word in self.provided for word in ("claims", "slices", "contents"))

    def with_case_at_step(self, step: int) -> Trial:
        """Return the trial with the case as it is in that step, where steps differ; otherwise the trial itself."""
        case = self.case.with_batch_of_step(step)
        return self if case is self.case else replace(self, case=case)

    @property
    def expected_ranks(self) -> list[int]:
        """Return the ranks that must have evidence: all started ones, but for recorded ones that another represents."""
        seen = self.run.recorded_ranks
        return [rank for rank in self.run.started_ranks if rank in self.ranks or rank not in seen]

    @functools.cached_property
    def _missing_evidence(self) -> str:
        """Return a text of the first evidence that is missing: ranks, or steps of the reference or of a rank.

        Empty if none is.
        """
        missing_ranks = [rank for rank in self.expected_ranks if rank not in self.ranks]
        if len(missing_ranks) > 1:
            return f"from {len(missing_ranks)} ranks ({', '.join(map(str, missing_ranks[:4]))}...)"
        if missing_ranks:
            return f"from rank {missing_ranks[0]}"
        recorded_steps: dict[str, set[int]] = {}
        if "reference" in self.run.provided:
            recorded_steps["the reference"] = {step.step for step in self.reference.steps}
        for rank in sorted(self.ranks):
            recorded_steps[f"rank {rank}"] = {step.step for step in self.ranks[rank].steps}
        for source, steps in recorded_steps.items():
            if missing_steps := sorted({*self.case.steps} - steps):
                return f"from {source} of step {', '.join(map(str, missing_steps))}"
        return ""

    @functools.cached_property
    def rank_summaries(self) -> list[Summary]:
        """Return the summaries of the ranks that were recorded, sorted by rank.

        A summary has digests of contents, and digests of inputs if the tokens are not known.
        """
        return [summary for _, summary in sorted(self.run.summaries.items())]

    def axis_groups_by_rank(self, axis: str) -> dict[int, tuple[int, ...]]:
        """Return, by rank, the ascending ranks that differ from it in this axis alone, itself included."""
        line_of_rank: dict[int, tuple[int, ...]] = {}
        for line in groups_along(self.plan.dims, axis):
            for rank in line:
                line_of_rank[rank] = line
        return line_of_rank

    @property
    def launches(self) -> tuple[Trial, ...]:
        """Return all launches in order, each as a trial: the earlier ones that this one continues, then this one."""
        return (*self.saved, self)

    @functools.cached_property
    def bounds(self) -> Bounds:
        """Return how far numbers may be from the reference's, by step. Raises tolerance.NoBound.

        Measured noise is the reference's own, or else the golden's.
        """
        noise = self.reference.noise or (self.golden.noise if self.golden else {})
        measured = noise.get(self.traits.noise_key(self.case))
        return tolerance.bounds_of_recipe(self.case, self.reference, measured, before=self.steps_before)

    @property
    def steps_before(self) -> tuple[ReferenceStep, ...]:
        """Return the earlier reference's steps up to the weights that this launch starts from.

        Empty unless it starts from weights alone.
        """
        after = self.case.model_of
        return () if after is None else self.saved[-1].reference.steps[:after]

    @property
    def seed_weights(self) -> dict[str, np.ndarray]:
        """Return, by fqn, the whole weights with which a trainer is built before it reads a checkpoint.

        They have this launch's shapes.
        """
        first_weights = self.launches[0].reference.weights
        own_weights = self.reference.weights
        if all(launch.case.model_of is None for launch in self.launches):
            return own_weights
        # A launch that starts from weights alone has a reference that begins with those, not with the seed's.
        return {fqn: full.reshape(own_weights[fqn].shape) for fqn, full in first_weights.items()}

    @property
    def traits(self) -> TrainerTraits:
        """Return the choices of this launch's trainer."""
        return self.plan.traits

    @property
    def allow(self) -> tuple[Allowance, ...]:
        """Return the allowances of the case, and those that the trainer declares in every case."""
        return self.case.allow + self.traits.allow

    @property
    def ranks(self) -> dict[int, RankEvidence]:
        """Return the evidence of this launch, by rank."""
        return self.run.ranks

    @functools.cached_property
    def local_slices(self) -> dict[int, dict[str, Slice | None]]:
        """Return, by rank and fqn, the slice of the seed weights that a rank really holds, found by comparing bytes.

        None for a parameter whose bytes were not found. Ranks without values are taken to hold what they claim.
        """
        if "values" in self.run.provided:
            return {rank: self._locate_slices(rank, evidence) for rank, evidence in self.ranks.items()}
        claims: dict[int, dict[str, Slice | None]] = {}
        for rank, evidence in self.ranks.items():
            claims[rank] = {tensor.fqn: claimed_slice(rank, tensor) for tensor in evidence.parameters}
        return claims

    def _locate_slices(self, rank: int, evidence: RankEvidence) -> dict[str, Slice | None]:
        """Return, by fqn, the slice of the seed weights whose bytes a rank holds. None where no slice has them.

        A rank that had read its checkpoint when it was first observed is compared with the checkpoint's weights, too.
        """
        slices: dict[str, Slice | None] = {}
        for tensor in evidence.parameters:
            full = self.seed_weights.get(tensor.fqn)
            guess = self.plan.slices[rank].get(tensor.fqn)
            slices[tensor.fqn] = None if full is None else find_slice(tensor.value, full, guess)
            if slices[tensor.fqn] is None and self._is_resumed_at_first(evidence) and tensor.fqn in self.saved_weights:
                slices[tensor.fqn] = find_slice(tensor.value, self.saved_weights[tensor.fqn], guess)
        return slices

    def _is_resumed_at_first(self, evidence: RankEvidence) -> bool:
        """Return whether a rank held its checkpoint's parameters when it was first observed, as a script's rank may.

        Such a rank never showed the seed weights.
        """
        resumed = evidence.resumed.parameters if evidence.resumed is not None else {}
        if not resumed:
            return False
        for tensor in evidence.parameters:
            checkpoint_value = resumed.get(tensor.fqn)
            if checkpoint_value is None or tensor.value.tobytes() != checkpoint_value.tobytes():
                return False
        return True

    @functools.cached_property
    def saved_weights(self) -> dict[str, np.ndarray]:
        """Return the whole parameters of the launch that saved the checkpoint, by fqn, NaN where no rank held an entry.

        Empty if this launch resumes no checkpoint.
        """
        if not self.saved:
            return {}
        launch = self.saved[-1]
        weights = whole_weights_after(launch, launch.case.saved_step or 0)
        return {fqn: full.reshape(self.plan.shapes[fqn]) for fqn, full in weights.items()}

    def slice_of(self, rank: int, fqn: str) -> Slice | None:
        """Return the slice that a rank holds of a parameter: where its bytes were found, else the plan's.

        None if neither has one.
        """
        located = self.local_slices[rank].get(fqn)
        return located if located is not None else self.plan.slices[rank].get(fqn)

    def gradient_slice_of(self, rank: int, fqn: str) -> Slice | None:
        """Return the slice that a rank holds of a parameter's gradient. None if it holds none.

        ZeRO may cut the gradient where the parameter is whole; the plan's slice is returned then.
        """
        gradient_slices = self.plan.gradient_slices
        return gradient_slices[rank].get(fqn) if gradient_slices else self.slice_of(rank, fqn)

    def initial_parameters(self, rank: int) -> dict[str, np.ndarray]:
        """Return, by fqn, the local parameters that a rank begins with: its checkpoint's if it resumed, or the seed's."""
        evidence = self.ranks[rank]
        if evidence.resumed is not None:
            return evidence.resumed.parameters
        return {tensor.fqn: tensor.value for tensor in evidence.parameters}

    def with_assumption(self, optimizer: AssumedOptimizer = AssumedOptimizer(), **fields: Any) -> Trial:  # noqa: B008 - frozen
        """Return the trial with this assumption added. fields: see Assumption.extended_with."""
        return replace(self, assumption=self.assumption.extended_with(optimizer, **fields))

    @property
    def first_step(self) -> int:
        return self.case.steps.start

    def reference_step(self, number: int) -> ReferenceStep:
        """Return the reference's record of a step. Raises StopIteration if there is none."""
        return next(step for step in self.reference.steps if step.step == number)

    def reference_of_rank(self, rank: int) -> ReferenceRun:
        """Return the reference of a rank: its own where an assumption gives it one, else the trial's."""
        return self.assumption.references.get(rank, self.reference)

    def steps_with_reference(self) -> Iterator[tuple[int, StepEvidence, ReferenceStep]]:
        """Yield (rank, the rank's record, the reference's record) of every step that both have, by rank."""
        for rank, evidence in sorted(self.ranks.items()):
            by_number = {step.step: step for step in self.reference_of_rank(rank).steps}
            for step in evidence.steps:
                if step.step in by_number:
                    yield rank, step, by_number[step.step]

    def own_steps(self) -> Iterator[tuple[int, StepEvidence]]:
        """Yield (rank, the rank's record) of every recorded step, by rank, also of steps that the reference lacks."""
        for rank, evidence in sorted(self.ranks.items()):
            for step in evidence.steps:
                yield rank, step


def launch_label(launch: Trial) -> str:
    """Return the label of an earlier launch of a case that resumes: "saved_1", "saved_2". Empty for the last launch."""
    return "" if launch.case.last_step is None else f"saved_{len(launch.saved) + 1}"
