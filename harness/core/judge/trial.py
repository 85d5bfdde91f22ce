"""Everything the checks may look at, gathered: the case, its plan, what the ranks left, what the reference left.

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
from harness.core.evidence.unplaced import unplaced
from harness.core.judge import tolerance
from harness.core.judge.assumed import AS_REQUESTED, AssumedOptimizer, Assumption
from harness.core.judge.claims import claimed_slice
from harness.core.judge.contents import locate
from harness.core.judge.golden import Golden
from harness.core.judge.held_values import weights_after
from harness.core.judge.tolerance import Bounds
from harness.core.plan.grid import groups
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
        """What of all that checks may need is there."""
        found = self.run.provided
        if why := unplaced({rank: evidence.own_groups for rank, evidence in self.ranks.items()}):
            found = found.without(("members",), why, unknown=True)
        missing = self._missing
        return found.unseen(f"no evidence {missing}; see `completed`") if missing else found

    @property
    def holds_told(self) -> bool:
        """Whether something other than traffic shows what ranks hold."""
        return any(word in self.provided for word in ("claims", "slices", "contents"))

    def of_step(self, step: int) -> Trial:
        """The trial with the case as it is in that step."""
        case = self.case.at(step)
        return self if case is self.case else replace(self, case=case)

    @property
    def due(self) -> list[int]:
        """The ranks of which evidence is to be read: all, but for those for which another one stands."""
        seen = self.run.seen
        return [rank for rank in self.run.started if rank in self.ranks or rank not in seen]

    @functools.cached_property
    def _missing(self) -> str:
        """Whose evidence is lacking: a rank's, some steps of a rank's, or the reference's. Empty if all is there."""
        lost = [rank for rank in self.due if rank not in self.ranks]
        if lost:
            some = f"{len(lost)} ranks ({', '.join(map(str, lost[:4]))}...)"
            return f"from {some if len(lost) > 1 else f'rank {lost[0]}'}"
        left = {"the reference": {one.step for one in self.reference.steps}} if "reference" in self.run.provided else {}
        left |= {f"rank {rank}": {step.step for step in self.ranks[rank].steps} for rank in sorted(self.ranks)}
        for who, steps in left.items():
            if lacking := sorted({*self.case.steps} - steps):
                return f"from {who} of step {', '.join(map(str, lacking))}"
        return ""

    @functools.cached_property
    def glances(self) -> list[Summary]:
        """Each rank that was seen, at a glance: contents, and inputs if the tokens are not known, as digests."""
        return [one for _, one in sorted(self.run.summaries.items())]

    def lines(self, axis: str) -> dict[int, tuple[int, ...]]:
        """Return, by rank, the ranks that differ from it in this axis alone."""
        return {rank: line for line in groups(self.plan.dims, axis) for rank in line}

    @property
    def launches(self) -> tuple[Trial, ...]:
        """The earlier launches that this one continues, each as a trial, and this one."""
        return (*self.saved, self)

    @functools.cached_property
    def bounds(self) -> Bounds:
        """How close is close, by step. Raises tolerance.NoBound."""
        noise = self.reference.noise or (self.golden.noise if self.golden else {})
        measured = noise.get(self.traits.noise_key(self.case))
        return tolerance.bounds(self.case, self.reference, measured, before=self.steps_before)

    @property
    def steps_before(self) -> tuple[ReferenceStep, ...]:
        """The steps of the earlier reference up to the weights that this launch starts from; none for all other launches."""
        after = self.case.model_of
        return () if after is None else self.saved[-1].reference.steps[:after]

    @property
    def seed_weights(self) -> dict[str, np.ndarray]:
        """What a trainer is built with, before it reads a checkpoint, in this launch's shapes."""
        first, shapes = (*self.saved, self)[0].reference.weights, self.reference.weights
        anew = any(one.case.model_of is not None for one in self.launches)
        return {fqn: full.reshape(shapes[fqn].shape) for fqn, full in first.items()} if anew else shapes

    @property
    def traits(self) -> TrainerTraits:
        """What the trainer of this launch chose."""
        return self.plan.traits

    @property
    def allow(self) -> tuple[Allowance, ...]:
        """What the case allows, and what the trainer declares in every case."""
        return self.case.allow + self.traits.allow

    @property
    def ranks(self) -> dict[int, RankEvidence]:
        return self.run.ranks

    @functools.cached_property
    def holdings(self) -> dict[int, dict[str, Slice | None]]:
        """Which slice of the seed weights each rank really holds, by comparing bytes; None: found nowhere. Ranks without values
        hold what they claim."""
        if "values" not in self.run.provided:
            return {r: {t.fqn: claimed_slice(r, t) for t in e.parameters} for r, e in self.ranks.items()}
        return {rank: self._holdings_of(rank, evidence) for rank, evidence in self.ranks.items()}

    def _holdings_of(self, rank: int, evidence: RankEvidence) -> dict[str, Slice | None]:
        held: dict[str, Slice | None] = {}
        for tensor in evidence.parameters:
            full = self.seed_weights.get(tensor.fqn)
            guess = self.plan.slices[rank].get(tensor.fqn)
            held[tensor.fqn] = None if full is None else locate(tensor.value, full, guess)
            if held[tensor.fqn] is None and self._began_resumed(evidence) and tensor.fqn in self.saved_weights:
                held[tensor.fqn] = locate(tensor.value, self.saved_weights[tensor.fqn], guess)
        return held

    def _began_resumed(self, evidence: RankEvidence) -> bool:
        """Whether it had read its checkpoint as soon as it was built, as a script does: it never held the seed weights."""
        resumed = evidence.resumed.parameters if evidence.resumed is not None else {}
        both = [(tensor.value, resumed.get(tensor.fqn)) for tensor in evidence.parameters]
        return bool(resumed) and all(b is not None and a.tobytes() == b.tobytes() for a, b in both)

    @functools.cached_property
    def saved_weights(self) -> dict[str, np.ndarray]:
        """Whole parameters as the launch that saved held them then, NaN where no rank did; nothing if this one resumes none."""
        launch = self.saved[-1] if self.saved else None
        found = weights_after(launch, launch.case.saved_step or 0) if launch else {}
        return {fqn: full.reshape(self.plan.shapes[fqn]) for fqn, full in found.items()}

    def slice_of(self, rank: int, fqn: str) -> Slice | None:
        """Where a rank's local part belongs: where its bytes were found, else where the plan puts it."""
        held = self.holdings[rank].get(fqn)
        return held if held is not None else self.plan.slices[rank].get(fqn)

    def gradient_slice_of(self, rank: int, fqn: str) -> Slice | None:
        """The same of its gradient, which ZeRO reduces to a part where a parameter is whole."""
        apart = self.plan.gradient_slices
        return apart[rank].get(fqn) if apart else self.slice_of(rank, fqn)

    def start_of(self, rank: int) -> dict[str, np.ndarray]:
        """The parameters a rank begins with: those of the checkpoint if it resumed, else the seed's."""
        evidence = self.ranks[rank]
        if evidence.resumed is not None:
            return evidence.resumed.parameters
        return {tensor.fqn: tensor.value for tensor in evidence.parameters}

    def assuming(self, optimizer: AssumedOptimizer = AssumedOptimizer(), **more: Any) -> Trial:  # noqa: B008 - frozen
        """The same evidence, with this assumption added: see Assumption.and_besides."""
        return replace(self, assumption=self.assumption.and_besides(optimizer, **more))

    @property
    def first_step(self) -> int:
        return self.case.steps.start

    def reference_step(self, number: int) -> ReferenceStep:
        return next(step for step in self.reference.steps if step.step == number)

    def reference_of(self, rank: int) -> ReferenceRun:
        return self.assumption.references.get(rank, self.reference)

    def steps(self) -> Iterator[tuple[int, StepEvidence, ReferenceStep]]:
        """Every rank's record of every step, with the reference's."""
        for rank, evidence in sorted(self.ranks.items()):
            by_number = {step.step: step for step in self.reference_of(rank).steps}
            for step in evidence.steps:
                if step.step in by_number:
                    yield rank, step, by_number[step.step]

    def own_steps(self) -> Iterator[tuple[int, StepEvidence]]:
        """Every rank's record of every step."""
        return ((rank, step) for rank, evidence in sorted(self.ranks.items()) for step in evidence.steps)


def launch_label(launch: Trial) -> str:
    """Empty for the last launch of a case."""
    return "" if launch.case.last_step is None else f"saved_{len(launch.saved) + 1}"
