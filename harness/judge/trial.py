"""Everything the checks may look at, gathered: the case, its plan, what the ranks left, what the reference left.

From here on nothing has effects: a Trial is stored evidence, and what is derived from it is pure arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.evidence.keys import ranks_of
from harness.evidence.records import RankEvidence, Run, StepEvidence
from harness.judge import tolerance
from harness.judge.assumed import AS_REQUESTED, AssumedOptimizer
from harness.judge.claims import claimed_slice
from harness.judge.contents import locate, take
from harness.judge.golden import Golden
from harness.judge.tolerance import Bounds
from harness.plan.grid import coordinate
from harness.plan.plan import Plan
from harness.plan.slices import Slice
from harness.reference.record import ReferenceRun, ReferenceStep
from harness.spec.allowance import Allowance
from harness.spec.case import Case
from harness.spec.traits import TrainerTraits


@dataclass(frozen=True)
class Recorded:
    """Of a recorded job, which has no reference. not_judged: by check, why. copies: how many numbers a parameter its optimizer
    keeps at most, None if unknown. unknown: by check, why what it would have to see was not seen. like: by rank that
    left evidence, the one that is read in its place; places: by rank, the groups that its record names. partial: which of its
    models are not on record, or not from the first step on; empty if all are. failed: where the
    recorder itself raised."""

    not_judged: Mapping[str, str]
    copies: int | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)
    like: Mapping[int, int] = field(default_factory=dict)
    places: Mapping[int, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    partial: str = ""
    failed: str = ""


@dataclass(frozen=True)
class Alone:
    """Of ranks that ran without each other. ranks: those that were started. not_judged: by check, why. unable: by rank, why it
    could not be run alone, where that says nothing of the trainer."""

    ranks: tuple[int, ...]
    not_judged: Mapping[str, str] = field(default_factory=dict)
    unable: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """One launch, and in `saved` those whose checkpoints it came from. The reference never stopped: it has all steps.

    What a hypothesis assumes that is put to the test: assumed, of the optimizer; otherwise, with what the reference was
    trained again (the words of reference.counterfactual.Otherwise); references, by rank, where ranks train apart; apart,
    whether they were assumed to, be it with one copy; reports, by check, what each rank reports of a step. recorded: of a job
    that was only recorded, alone: of ranks that ran alone; their reference is empty.
    """

    case: Case
    plan: Plan
    run: Run
    reference: ReferenceRun
    repeat: Run | None = None
    golden: Golden | None = None
    golden_problem: str = ""
    saved: tuple[Trial, ...] = ()
    assumed: AssumedOptimizer = AS_REQUESTED
    otherwise: Mapping[str, Any] = field(default_factory=dict)
    reports: Mapping[str, Callable[[int, int], float]] = field(default_factory=dict)
    references: Mapping[int, ReferenceRun] = field(default_factory=dict)
    apart: bool = False
    recorded: Recorded | None = None
    alone: Alone | None = None

    @property
    def started(self) -> tuple[int, ...]:
        """The ranks of which evidence is due: all, but for those for which another one stands."""
        if self.alone is not None:
            return self.alone.ranks
        return tuple(rank for rank in range(self.run.world_size) if rank in self.ranks or rank not in self.seen)

    @functools.cached_property
    def seen(self) -> frozenset[int]:
        """The ranks that left evidence, though another one may be read in their place."""
        return frozenset(self.ranks) | frozenset(self.recorded.like if self.recorded is not None else ())

    def evidence_like(self, rank: int) -> RankEvidence:
        """Of a rank that left some; ranks that it names may be others'."""
        return self.ranks[rank if rank in self.ranks or self.recorded is None else self.recorded.like[rank]]

    def groups_on_all(self, chosen: Callable[[RankEvidence], Iterable[tuple[int, ...]]]) -> set[tuple[int, ...]]:
        """The groups that are chosen of the evidence of each rank."""
        found = {rank: set(chosen(evidence)) for rank, evidence in self.ranks.items()}
        groups = set().union(*found.values())
        if self.recorded is None:
            return groups
        places = self.recorded.places
        for rank, one in self.recorded.like.items():
            if rank != one:
                named = zip(places[one], places[rank], strict=True)
                groups |= {ranks_of(theirs) for (_, ours), (_, theirs) in named if ranks_of(ours) in found[one]}
        return groups

    @property
    def launches(self) -> tuple[Trial, ...]:
        """The earlier launches that this one continues, each a trial of its own, and this one."""
        return (*self.saved, self)

    @functools.cached_property
    def bounds(self) -> Bounds:
        """How close is close, by step. Raises tolerance.NoBound."""
        noise = self.reference.noise or (self.golden.noise if self.golden else {})
        return tolerance.bounds(self.case, self.reference, noise.get(self.traits.noise_key(self.case)))

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
        """Which slice of the seed weights each rank really holds, by comparing bytes; None: found nowhere. Of ranks without
        values, those that they claim."""
        if self.recorded is not None or self.alone is not None:
            return {r: {t.fqn: claimed_slice(r, t) for t in e.parameters} for r, e in self.ranks.items()}
        return {rank: self._holdings_of(rank, evidence) for rank, evidence in self.ranks.items()}

    def _holdings_of(self, rank: int, evidence: RankEvidence) -> dict[str, Slice | None]:
        held: dict[str, Slice | None] = {}
        for tensor in evidence.parameters:
            full = self.reference.weights.get(tensor.fqn)
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
        whole: dict[str, np.ndarray] = {}
        for launch in self.saved[-1:]:
            for rank, step in launch.own_steps():
                for fqn, value in step.parameters.items() if step.step == launch.case.saved_step else ():
                    full = whole.setdefault(fqn, np.full(launch.plan.shapes[fqn], np.nan, value.dtype))
                    part = launch.slice_of(rank, fqn)
                    if part is not None and take(full, part).shape == value.shape:
                        take(full, part)[...] = value
        return {fqn: full.reshape(self.plan.shapes[fqn]) for fqn, full in whole.items()}

    def slice_of(self, rank: int, fqn: str) -> Slice | None:
        """Where a rank's local part belongs: where its bytes were found, else where the plan puts it."""
        held = self.holdings[rank].get(fqn)
        return held if held is not None else self.plan.slices[rank].get(fqn)

    def gradient_slice_of(self, rank: int, fqn: str) -> Slice | None:
        """The same of its gradient, which ZeRO reduces to a part where a parameter is whole."""
        apart = self.plan.gradient_slices
        return apart[rank].get(fqn) if apart else self.slice_of(rank, fqn)

    def stepped_part(self, rank: int, fqn: str, held: np.ndarray) -> np.ndarray:
        """Of what a rank holds of a parameter, what its own optimizer steps on: under ZeRO-1 and 2 a part of it."""
        part, wanted = self.slice_of(rank, fqn), self.plan.state_slices and self.plan.state_slices[rank].get(fqn)
        if not part or not wanted or part == wanted:
            return held
        return held[tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(wanted, part, strict=True))]

    def start_of(self, rank: int) -> dict[str, np.ndarray]:
        """The parameters a rank begins with: those of the checkpoint if it resumed, else the seed's."""
        evidence = self.ranks[rank]
        if evidence.resumed is not None:
            return evidence.resumed.parameters
        return {tensor.fqn: tensor.value for tensor in evidence.parameters}

    @property
    def as_requested(self) -> bool:
        """Whether nothing is assumed."""
        return self.assumed is AS_REQUESTED and not (self.otherwise or self.reports or self.apart)

    @property
    def first_step(self) -> int:
        return self.case.steps.start

    def reference_step(self, number: int) -> ReferenceStep:
        return next(step for step in self.reference.steps if step.step == number)

    def reference_of(self, rank: int) -> ReferenceRun:
        return self.references.get(rank, self.reference)

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

    def one_rank_per_share(self) -> list[int]:
        """The ranks that between them received each sample once: first stages at cp 0 and tp 0."""
        places = {rank: coordinate(self.case.dims, rank) for rank in self.first_stages()}
        return [rank for rank, place in places.items() if (place["cp"], place["tp"]) == (0, 0)]

    def first_stages(self) -> list[int]:
        """The ranks that receive tokens."""
        return [rank for rank in self.ranks if 0 in self.plan.stages[rank]]

    def last_stages(self) -> list[int]:
        """The ranks that compute a loss."""
        return [rank for rank in self.ranks if self.case.n_stages - 1 in self.plan.stages[rank]]

    def feeder(self, rank: int) -> int:
        """The rank of the same pipeline that runs the first stage, and so receives the tokens whose loss `rank` computes."""
        return next(peer for peer in self.plan.peers(rank, "pp") if 0 in self.plan.stages[peer])


def launch_label(launch: Trial) -> str:
    """Empty for the last launch of a case."""
    return "" if launch.case.last_step is None else f"saved_{len(launch.saved) + 1}: "
