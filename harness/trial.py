"""Everything the laws may look at, gathered: the case, its plan, what the ranks left, what the reference left.

From here on nothing has effects: a Trial is stored evidence, and what is derived from it is pure arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np

from harness import tolerance
from harness.case import Case
from harness.evidence import RankEvidence, Resumed, Run, StepEvidence
from harness.golden import Golden
from harness.plan import Plan, Slice, coordinate, numel
from harness.tolerance import Bounds
from reference.record import ReferenceRun, ReferenceStep

Step = TypeVar("Step", StepEvidence, ReferenceStep)
State = TypeVar("State", StepEvidence, ReferenceStep, Resumed)


class Verdict(StrEnum):
    """XFAIL is a case's only, never a law's: it failed in just the way that it is expected to."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"
    XFAIL = "XFAIL"
    NOT_APPLICABLE = "NOT APPLICABLE"


@dataclass(frozen=True)
class Finding:
    """One place where a law is broken: where, what was expected, what was observed, and the bound if it is a number."""

    where: str
    expected: str
    observed: str
    bound: str = ""


@dataclass(frozen=True)
class Result:
    """A law's verdict on a trial. `examined` counts the things compared; a law that examined nothing cannot pass.

    note: what a person should know of a verdict: why UNKNOWN or NOT APPLICABLE, the largest difference of PASS.
    """

    check: str
    verdict: Verdict
    examined: int = 0
    findings: tuple[Finding, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Trial:
    """One launch, and in `saved` those whose checkpoints it came from. The reference never stopped: it has all steps."""

    case: Case
    plan: Plan
    run: Run
    reference: ReferenceRun
    repeat: Run | None = None
    golden: Golden | None = None
    golden_problem: str = ""
    saved: tuple[Trial, ...] = ()

    @property
    def launches(self) -> tuple[Trial, ...]:
        """The earlier launches that this one continues, each a trial of its own, and this one."""
        return (*self.saved, self)

    @functools.cached_property
    def bounds(self) -> Bounds:
        """How close is close, by step. Raises tolerance.NoBound."""
        noise = self.reference.noise or (self.golden.noise if self.golden else {})
        return tolerance.bounds(self.case, self.reference, noise.get(self.case.noise_key))

    @property
    def ranks(self) -> dict[int, RankEvidence]:
        return self.run.ranks

    @functools.cached_property
    def holdings(self) -> dict[int, dict[str, Slice | None]]:
        """Which slice of the seed weights each rank really holds, by comparing bytes; None: found nowhere."""
        return {rank: self._holdings_of(rank, evidence) for rank, evidence in self.ranks.items()}

    def _holdings_of(self, rank: int, evidence: RankEvidence) -> dict[str, Slice | None]:
        held: dict[str, Slice | None] = {}
        for tensor in evidence.parameters:
            full = self.reference.weights.get(tensor.fqn)
            guess = self.plan.slices[rank].get(tensor.fqn)
            held[tensor.fqn] = None if full is None else locate(tensor.value, full, guess)
        return held

    def slice_of(self, rank: int, fqn: str) -> Slice | None:
        """Where a rank's local part belongs: where its bytes were found, else where the plan puts it."""
        held = self.holdings[rank].get(fqn)
        return held if held is not None else self.plan.slices[rank].get(fqn)

    def start_of(self, rank: int) -> dict[str, np.ndarray]:
        """The parameters a rank begins with: those of the checkpoint if it resumed, else the seed's."""
        evidence = self.ranks[rank]
        if evidence.resumed is not None:
            return evidence.resumed.parameters
        return {tensor.fqn: tensor.value for tensor in evidence.parameters}

    @property
    def first_step(self) -> int:
        return self.case.steps.start

    def reference_step(self, number: int) -> ReferenceStep:
        return next(step for step in self.reference.steps if step.step == number)

    def steps(self) -> Iterator[tuple[int, StepEvidence, ReferenceStep]]:
        """Every rank's account of every step, beside the reference's."""
        by_number = {step.step: step for step in self.reference.steps}
        for rank, evidence in sorted(self.ranks.items()):
            for step in evidence.steps:
                if step.step in by_number:
                    yield rank, step, by_number[step.step]

    def one_rank_per_share(self) -> list[int]:
        """The ranks that between them were fed each sample once: first stages at cp 0 and tp 0."""
        places = {rank: coordinate(self.case.dims, rank) for rank in self.first_stages()}
        return [rank for rank, place in places.items() if (place["cp"], place["tp"]) == (0, 0)]

    def first_stages(self) -> list[int]:
        """The ranks that are fed tokens."""
        return [rank for rank in self.ranks if 0 in self.plan.stages[rank]]

    def last_stages(self) -> list[int]:
        """The ranks that compute a loss."""
        return [rank for rank in self.ranks if self.case.n_stages - 1 in self.plan.stages[rank]]

    def feeder(self, rank: int) -> int:
        """The rank of the same pipeline that runs the first stage, so that is fed the tokens whose loss `rank` computes."""
        return next(peer for peer in self.plan.peers(rank, "pp") if 0 in self.plan.stages[peer])


def as_planned(trial: Trial) -> Trial:
    """The same trial; the reference's rows in the trainer's order, and every tensor as a vector where the plan cuts flattened
    parameters, so that no law need know."""
    rows = {fqn: order for evidence in trial.ranks.values() for fqn, order in evidence.rows.items()}
    if rows:
        trial = dataclasses.replace(trial, reference=reordered_reference(trial.reference, rows))
    if not trial.plan.flat:
        return trial
    run, repeat = _flattened_run(trial.run), trial.repeat and _flattened_run(trial.repeat)
    return dataclasses.replace(trial, reference=flattened_reference(trial.reference), run=run, repeat=repeat)


def reordered_reference(reference: ReferenceRun, rows: dict[str, np.ndarray]) -> ReferenceRun:
    """rows: by fqn, which of its rows each row is to be."""

    def ordered(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {fqn: array[rows[fqn]] if fqn in rows else array for fqn, array in arrays.items()}

    def state(fqn: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {key: array[rows[fqn]] for key, array in arrays.items()} if fqn in rows else arrays

    def position(fqn: str, flat: np.ndarray) -> np.ndarray:
        columns = reference.weights[fqn][0].size
        return np.argsort(rows[fqn])[flat // columns] * columns + flat % columns if fqn in rows else flat

    steps = tuple(
        dataclasses.replace(
            step,
            gradients=ordered(step.gradients),
            parameters=ordered(step.parameters),
            optimizer_state={fqn: state(fqn, arrays) for fqn, arrays in step.optimizer_state.items()},
        )
        for step in reference.steps
    )
    positions = {fqn: position(fqn, flat) for fqn, flat in reference.sample_positions.items()}
    return dataclasses.replace(reference, weights=ordered(reference.weights), steps=steps, sample_positions=positions)


def flattened_reference(reference: ReferenceRun) -> ReferenceRun:
    steps = tuple(_flattened_step(step) for step in reference.steps)
    return dataclasses.replace(reference, weights=_flattened(reference.weights), steps=steps)


def _flattened_run(run: Run) -> Run:
    return dataclasses.replace(run, ranks={rank: _flattened_rank(evidence) for rank, evidence in run.ranks.items()})


def _flattened_rank(evidence: RankEvidence) -> RankEvidence:
    parameters = tuple(dataclasses.replace(t, value=t.value.ravel()) for t in evidence.parameters)
    steps = tuple(_flattened_step(step) for step in evidence.steps)
    resumed = evidence.resumed and _flattened_state(evidence.resumed)
    return dataclasses.replace(evidence, parameters=parameters, steps=steps, resumed=resumed)


def _flattened_step(step: Step) -> Step:
    return dataclasses.replace(_flattened_state(step), gradients=_flattened(step.gradients))


def _flattened_state(record: State) -> State:
    state = {fqn: _flattened(values) for fqn, values in record.optimizer_state.items()}
    return dataclasses.replace(record, parameters=_flattened(record.parameters), optimizer_state=state)


def _flattened(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Not an optimizer's step counter, which has no dims."""
    return {name: array.ravel() if array.ndim else array for name, array in arrays.items()}


def locate(value: np.ndarray, full: np.ndarray, guess: Slice | None = None) -> Slice | None:
    """The slice of `full` whose bytes are those of `value`; `guess` is tried first. None if there is none."""
    if value.ndim != full.ndim:
        return None
    if value.size == 0:
        return guess if guess is not None and numel(guess) == 0 else tuple((0, size) for size in value.shape)
    places = (_from(corner, value.shape) for corner in _corners(value, full, guess))
    return next((place for place in places if _is_at(value, full, place)), None)


def _corners(value: np.ndarray, full: np.ndarray, guess: Slice | None) -> Iterator[Iterable[int]]:
    """Where the value may begin."""
    if guess is not None:
        yield [start for start, _ in guess]
    yield from np.argwhere(full == value.flat[0])


def _from(corner: Iterable[int], shape: tuple[int, ...]) -> Slice:
    return tuple((int(start), int(start) + size) for start, size in zip(corner, shape, strict=True))


def _is_at(value: np.ndarray, full: np.ndarray, place: Slice) -> bool:
    region = take(full, place)
    return region.shape == value.shape and region.dtype == value.dtype and region.tobytes() == value.tobytes()


def take(full: np.ndarray, part: Slice) -> np.ndarray:
    return full[tuple(slice(start, stop) for start, stop in part)]


def ranks_text(ranks: tuple[int, ...] | list[int]) -> str:
    """Ranks as a person writes them: [0-7], [0,8], [0,2,4,6]."""
    ranks = sorted(ranks)
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"[{ranks[0]}-{ranks[-1]}]"
    return "[" + ",".join(map(str, ranks)) + "]"


def bytes_text(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def worst_first(findings: list[Finding], most: int = 8) -> tuple[Finding, ...]:
    """At most `most` findings, and how many more there are; the caller has put the worst in front."""
    if len(findings) <= most:
        return tuple(findings)
    return (*findings[:most], Finding(f"and {len(findings) - most} more", "", ""))


def launch_label(launch: Trial) -> str:
    """Empty for the last launch of a case."""
    return "" if launch.case.last_step is None else f"saved_{len(launch.saved) + 1}: "


def not_applicable(name: str, reason: str) -> Result:
    return Result(name, Verdict.NOT_APPLICABLE, note=reason)


def verdict_of(name: str, findings: list[Finding], examined: int, note: str = "") -> Result:
    """FAIL with findings, PASS without."""
    verdict = Verdict.FAIL if findings else Verdict.PASS
    return Result(name, verdict, examined, tuple(findings), note)


@dataclass(frozen=True)
class Diagnosis:
    """cause: one line. evidence: (label, text), what was expected and observed."""

    cause: str
    evidence: tuple[tuple[str, str], ...] = ()


def positions_text(positions: np.ndarray) -> str:
    """0-3 and 12-15."""
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return " and ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
