"""Evidence of two recordings of what should be the same training, which is judged again under an assumption.

An assumption is judged by what is not later than the first wrong check: by that check, and all before it, up to its
step. What comes later may follow from what is first wrong, in ways that sketches do not show. An optimizer squares
gradients, for example, and later gradients are those of other weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from harness.core.causes.hypothesis import Hypothesis
from harness.core.causes.words import shorten_names
from harness.core.judge.result import Cause, Lines, Result, Verdict
from harness.recording.judged.judge_same_training import CHECKS, Comparison, compare_numbers
from harness.recording.judged.judge_sketched import Key, Numbers, missing_ranks, without_nonfinite, without_other_shapes
from harness.recording.judged.recorded_recipe import SCALE
from harness.recording.judged.sketch_distances import OF_UPDATES, TensorDistance
from harness.recording.sketches import GRADIENT, WEIGHTS

FEW = 3
"""Names of parameters that a sentence lists."""


@dataclass(frozen=True)
class TwoRecordings:
    """Two recordings, and where the second one first differs."""

    baseline: Numbers
    """The recording that is trusted, as it is or as it is assumed."""
    candidate: Numbers
    """The one that is judged, as it is or as it is assumed."""
    comparison: Comparison
    """The verdicts of all checks without an assumption."""
    first: Result
    """The check that fails first."""
    step: int
    """The step in which it first fails: 0 for what training starts with."""

    @classmethod
    def at_first_failure(cls, baseline: Numbers, candidate: Numbers, comparison: Comparison) -> Self | None:
        """Return both with the first check that fails: in the earliest step, then by the order of CHECKS.

        None if no check fails. A wrong loss scale comes first in its step.
        """
        failed = [result for result in comparison.results if result.verdict is Verdict.FAIL]
        if not failed:
            return None
        first = min(
            failed, key=lambda result: (first_step(result), not _is_loss_scale(result), CHECKS.index(result.check))
        )
        return cls(
            without_nonfinite(baseline),
            without_other_shapes(candidate, baseline.shapes),
            comparison,
            first,
            first_step(first),
        )

    @functools.cached_property
    def judged(self) -> Comparison:
        """The comparison of the recordings up to the first wrong check, as they are or as they are assumed."""
        return compare_numbers(*self._numbers_until_first(), bounds=self.comparison.bounds)

    def result_of(self, check: str) -> Result:
        """Return the result of a check up to the first wrong one."""
        return next(result for result in self.judged.results if result.check == check)

    def results(self) -> list[Result]:
        """Return the results that an assumption has to change, or may not change."""
        return [self.first if result.check == self.first.check else result for result in self.judged.results]

    @property
    def names(self) -> list[str]:
        """The fqns of the first wrong check's findings in its step; empty if they are of no parameter."""
        findings = [finding for finding in self.first.findings if finding.kind == "parameter"]
        return list(dict.fromkeys(finding.name for finding in findings if (finding.step or 0) == self.step))

    @functools.cached_property
    def distances(self) -> list[TensorDistance]:
        """The distances of all tensors that the first wrong check compares in its step; empty if it compares no tensors."""
        return [distance for distance in self.judged.differences if self._is_of_first(distance.key)]

    @property
    def wrong(self) -> list[TensorDistance]:
        """The distances beyond their bound, or of tensors that ranks have different copies of."""
        return [distance for distance in self.distances if distance.is_wrong or self.copies(distance.key)]

    def copies(self, key: Key) -> Mapping[str, Sequence[tuple[int, np.ndarray]]]:
        """Return the different copies that ranks of the second recording have of a tensor: slice -> ranks and their
        sketches.

        Empty if all copies are the same, or the tensor is not known.
        """
        return self.candidate.whole[key].replicas if key in self.candidate.whole else {}

    def expected_sketch(self, key: Key) -> np.ndarray:
        """Return the first recording's sketch."""
        return self.baseline.whole[key].sums

    def observed_sketch(self, key: Key) -> np.ndarray:
        """Return the second recording's sketch."""
        return self.candidate.whole[key].sums

    def parameters_text(self, names: Sequence[str]) -> str:
        """Return "in every parameter" or "in 3 of 10 parameters (a, b, ..)".

        names: those that are meant. They may be in the second recording alone, and then count among all.
        """
        every = {*names, *self.baseline.shapes}
        if {*names} == every:
            return "in every parameter"
        return f"in {len(names)} of {len(every)} parameters ({shorten_names(names, FEW)})"

    # ---- under an assumption

    def if_first_had(self, sketches: Mapping[Key, np.ndarray]) -> Self:
        """Return the evidence with these sketches in place of the first recording's. Keys must be in that recording."""
        return replace(self, baseline=_with_sketches(self.baseline, sketches))

    def if_second_had(self, sketches: Mapping[Key, np.ndarray]) -> Self:
        """Return the evidence with these sketches in place of the second recording's, the same on all ranks."""
        return replace(self, candidate=_with_sketches(self.candidate, sketches))

    def without_tensors(self, keys: Iterable[Key]) -> Self:
        """Return the evidence without these tensors in either recording: their values do not follow from sketches."""
        gone = {*keys}
        return replace(self, baseline=_drop_tensors(self.baseline, gone), candidate=_drop_tensors(self.candidate, gone))

    def hypothesis(
        self,
        cause: Cause,
        assume: Callable[[TwoRecordings], TwoRecordings],
        *,
        names: Iterable[str],
        fitted: int = 1,
        lines: Lines = (),
    ) -> Hypothesis[TwoRecordings]:
        """Return the hypothesis that this cause is so, with step and parameters added to the cause.

        assume: makes the evidence as if it were so. names: fqns that it is of. A second cause is not looked for under
        it: each sentence says what the second recording has, and not what it would have.
        """
        parameters = tuple(dict.fromkeys(names))
        details = (*cause.details, ("step", self.step), ("parameters", parameters))
        where = cause.where or self.parameters_text(parameters)
        placed = replace(cause, where=where, details=details)
        return Hypothesis(placed, assume, fitted, lines, renumbers_ranks=True)

    # ---- up to the first wrong check

    def _is_of_first(self, key: Key) -> bool:
        """Return whether the first wrong check compares this tensor in its step."""
        step, kind, _ = key
        of_state = kind not in (GRADIENT, WEIGHTS, OF_UPDATES)
        of_check = {"gradients": kind == GRADIENT, "optimizer_state": of_state, "update": kind == OF_UPDATES}
        return step == self.step and of_check.get(self.first.check, False)

    def _is_until_first(self, key: Key) -> bool:
        """Return whether a tensor is known in both recordings, and is no later than the first wrong check."""
        step, kind, fqn = key
        if fqn not in self._known_in_both or key in self.baseline.unknown or key in self.candidate.unknown:
            return False
        if kind == WEIGHTS and step in (self.baseline.after, self.step - 1):
            return True
        check = {GRADIENT: "gradients", WEIGHTS: "update"}.get(kind, "optimizer_state")
        return step == self.step and CHECKS.index(check) <= CHECKS.index(self.first.check)

    @functools.cached_property
    def _known_in_both(self) -> set[str]:
        """The first recording's parameters.

        Where a rank of the second left nothing, without those that the second lacks.
        """
        lost = {*self.baseline.shapes} - {*self.candidate.shapes} if missing_ranks(self.candidate) else set()
        return {*self.baseline.shapes} - lost

    def _numbers_until_first(self) -> tuple[Numbers, Numbers]:
        """Return both recordings' numbers up to the first wrong check, as if each rank had left some.

        What missing ranks had is as open with an assumption as without it.
        """
        shapes = {fqn: shape for fqn, shape in self.candidate.shapes.items() if fqn in self.baseline.shapes}
        has_norms = CHECKS.index(self.first.check) >= CHECKS.index("grad_norm")
        kept = []
        for numbers in (self.baseline, replace(self.candidate, shapes=shapes)):
            whole = {key: tensor for key, tensor in numbers.whole.items() if self._is_until_first(key)}
            norms = numbers.norms if has_norms else {}
            ranks = tuple(range(numbers.world))
            kept.append(replace(numbers, whole=whole, unknown={}, norms=norms, ranks=ranks))
        return kept[0], kept[1]


def first_step(result: Result) -> int:
    """Return the step of the first finding; 0 for what training starts with, and without findings."""
    return min((finding.step or 0 for finding in result.findings), default=0)


def _is_loss_scale(result: Result) -> bool:
    """Return whether a finding of the first step is a loss scale: one that is too large leaves steps out, and later
    samples are others."""
    return any(finding.name == SCALE and finding.step == first_step(result) for finding in result.findings)


def _with_sketches(numbers: Numbers, sketches: Mapping[Key, np.ndarray]) -> Numbers:
    """Return the numbers with these sketches in place of their own, of which all ranks have the same copies."""
    changed = {}
    for key, sums in sketches.items():
        changed[key] = replace(numbers.whole[key], sums=sums, squares=float(sums @ sums), replicas={})
    return replace(numbers, whole={**numbers.whole, **changed})


def _drop_tensors(numbers: Numbers, keys: set[Key]) -> Numbers:
    return replace(numbers, whole={key: tensor for key, tensor in numbers.whole.items() if key not in keys})
