"""What wrong gradients of a recording are, where sketches show it.

Sketches are linear, so many wrong gradients are found without the tensors. Such a gradient is a multiple of the right one, or
that of another step or parameter. It is a sum of these, each rank's own part, or a sum in which passes count unequally. Its
sketch is then the same sum of sketches, for all parameters alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.core.causes.words import some
from harness.core.evidence.text import names_text, number_text, ranks_text
from harness.core.judge.result import Cause, Result
from harness.recording.judged.judge_same_training import Comparison
from harness.recording.judged.judge_sketched import Numbers
from harness.recording.judged.sketch_distances import TensorDistance, apart, wrong_rows
from harness.recording.judged.sketched_passes import counted_otherwise
from harness.recording.sketches import GRADIENT, WEIGHTS

FLOAT32 = 1e-6
"""What arithmetic in float32 rounds of a float64 gradient at most, relative to its norm."""
CLEAR = 4.0
"""Times its bound that a distance is no noise."""
FEW = 3
Sums = Callable[[TensorDistance], "np.ndarray | None"]
"""What the second recording's sketch would be."""
Way = tuple[Cause, Sums]


@dataclass(frozen=True)
class Wrong:
    """Gradients of the first step in which any is wrong."""

    one: Numbers
    """The recording that is trusted."""
    other: Numbers
    """The one that is judged."""
    step: int
    """That step."""
    differences: tuple[TensorDistance, ...]
    """Those of wrong gradients."""

    @property
    def bound(self) -> float:
        """The largest distance that is no mistake, of any of them."""
        return max(d.bound for d in self.differences)

    def right(self, d: TensorDistance) -> np.ndarray:
        return self.one.whole[d.key].sums

    def seen(self, d: TensorDistance) -> np.ndarray:
        return self.other.whole[d.key].sums

    def is_so(self, sums: Sums) -> bool:
        """Whether this is what the second recording has in all of them, within their bounds."""

        def one_is(d: TensorDistance) -> bool:
            wanted = sums(d)
            return wanted is not None and apart(wanted, self.seen(d))[0] <= d.bound

        return all(map(one_is, self.differences))


def gradients_cause(one: Numbers, other: Numbers, found: Comparison, result: Result) -> Cause:
    """Return what they are in the first step in which any is wrong; where they are wrong, if that is all that is known."""
    step = min(finding.step or 0 for finding in result.findings)
    of_step = [finding for finding in result.findings if finding.step == step]
    names = list(dict.fromkeys(finding.name for finding in of_step if finding.kind == "parameter"))
    ranks = sorted({rank for finding in of_step for rank in finding.ranks})
    differences = [d for d in found.differences if d.key[:2] == (step, GRADIENT) and (d.is_wrong or d.key[2] in names)]
    where, details = in_words(names, one), (("step", step), ("parameters", tuple(names)))
    if cause := _plain_to_see(one, other, step, [f.name for f in of_step if f.observed == "none"], names):
        return replace(cause, details=(*cause.details, *details))
    if differences:
        wrong = Wrong(one, other, step, tuple(differences))
        for cause, sums in _not_reduced(wrong, ranks) if ranks else _ways(wrong):
            if wrong.is_so(sums):
                return replace(cause, where=cause.where or where, details=(*cause.details, *details))
        if not ranks and (rounded := _rounded(wrong)):
            return replace(rounded, where=where, details=(*rounded.details, *details))
    both_looked = any((at, kind) == (step - 1, WEIGHTS) for at, kind, _ in one.whole)
    if both_looked and (changed := other.changed.get(step)) and not one.changed.get(step):
        text = f"weights are others as step {step} begins than they were after step {step - 1}"
        told = (("step", step), ("parameters", changed))
        return Cause("weights changed between steps", text, in_words(changed, one), details=told)
    if len(differences) == 1 == len(names) and (rows := wrong_rows(one, other, differences[0])):
        where += f", {rows}"
    text = f"gradients, or weights before them, are wrong from step {step} on" if step > 1 else "gradients are wrong"
    hint = ""
    if step > 1 and not any(at and kind == WEIGHTS for at, kind, _ in other.whole):
        hint = "no optimizer was seen to step on any of them"
    if ranks:
        unequal = list(dict.fromkeys(finding.name for finding in of_step if finding.ranks))
        hint = f"ranks {ranks_text(ranks)} have different ones of the same slice {in_words(unequal, one)}"
    drawn, why = _drawn_otherwise(one, other, step)
    kind = "random state not restored" if drawn and one.after else "not explained"
    details = (("place", "gradients"), *details, *((("ranks", drawn),) if drawn else ()))
    return Cause(kind, text, where, hint=hint or why, details=details)


def _drawn_otherwise(one: Numbers, other: Numbers, step: int) -> tuple[tuple[int, ...], str]:
    """Return ranks whose pass drew other random numbers than the same rank of the first recording, and a hint. None and empty
    where passes draw none."""
    mine, theirs = one.drawn.get(step, {}), other.drawn.get(step, {})
    drawing = [rank for rank, (begin, end) in theirs.items() if begin != end]
    if not drawing or all(begin == end for begin, end in mine.values()):
        return (), ""
    hint = "forward passes draw random numbers, as dropout does"
    if mine.keys() != theirs.keys():
        return (), f"{hint}, and other ranks draw others: leave it out of both"
    odd = tuple(sorted(rank for rank in drawing if theirs[rank][0] != mine[rank][0]))
    return odd, f"{hint}, and generators stand elsewhere on ranks {ranks_text(odd)}" if odd else ""


def in_words(names: Sequence[str], numbers: Numbers) -> str:
    """Return in how many parameters it is. numbers: the first recording's; names may be in the second alone."""
    every = {*names, *numbers.shapes}
    if {*names} == every:
        return "in every parameter"
    return f"in {len(names)} of {len(every)} parameters ({some(names, FEW)})"


def _plain_to_see(one: Numbers, other: Numbers, step: int, none: Sequence[str], names: Sequence[str]) -> Cause | None:
    """Gradients that are not there, and numbers that are not finite."""
    odd = [
        fqn for fqn in names if (whole := other.whole.get((step, GRADIENT, fqn))) and not math.isfinite(whole.length)
    ]
    if odd:
        return Cause("not finite", f"gradients of step {step} are NaN or infinite", in_words(odd, one))
    if none and {*none} == {*names}:
        return Cause("incomplete", f"no gradient comes in step {step}", in_words(names, one))
    return None


# ---- what gradients may be


def _not_reduced(wrong: Wrong, ranks: Sequence[int]) -> Iterator[Way]:
    """What ranks have of the same slice differs, and the mean of it is the right one, or a plain multiple."""
    for factor in (1.0, 1.0 / len(ranks), float(len(ranks))):
        if all(_mean_is(wrong.other, d, factor * wrong.right(d)) for d in wrong.differences):
            text = f"gradients are not reduced over ranks {ranks_text([*ranks])}: "
            alike = _alike(wrong)
            text += f"{' '.join(map(ranks_text, alike))} have the same ones" if alike else "each keeps its own"
            hint = f"their {'mean' if factor == 1 else 'sum'} is the first recording's" if factor <= 1 else ""
            details = (("ranks", tuple(ranks)), ("alike", tuple(alike)))
            if 0 < factor < 1 and all("norm" in d.key[2] for d in wrong.differences):
                text = f"gradients of norm weights are not summed over ranks {ranks_text([*ranks])}"
                yield Cause("norms not summed", text, details=details), wrong.seen
            yield Cause("gradients not reduced", text, hint=hint, details=details), wrong.seen


def _alike(wrong: Wrong) -> list[tuple[int, ...]]:
    """Return ranks that hold the same slices and the same numbers of them; none if each has its own."""
    alike: dict[int, set[int]] = {}
    for held in (held for d in wrong.differences for held in wrong.other.whole[d.key].replicas.values()):
        for rank, sums in held:
            same = {one for one, theirs in held if apart(sums, theirs)[0] <= FLOAT32}
            alike[rank] = alike.get(rank, same) & same
    return sorted({tuple(sorted(of)) for of in alike.values() if len(of) > 1})


def _mean_is(other: Numbers, difference: TensorDistance, wanted: np.ndarray) -> bool:
    """Whether the mean of what holders of each slice have is this."""
    whole = other.whole[difference.key]
    total = whole.sums.copy()
    for held in whole.replicas.values():
        total += np.mean([sums for _, sums in held], axis=0) - held[0][1]
    return apart(wanted, total)[0] <= difference.bound


def _ways(wrong: Wrong) -> Iterator[Way]:
    for way in (_scaled, _of_the_step_before, _of_passes, _scaled_apart, _of_other_parameters):
        yield from way(wrong)


def _scaled(wrong: Wrong) -> Iterator[Way]:
    """One factor."""
    fits = [d.fit for d in wrong.differences if math.isfinite(d.fit)]
    if fits and np.ptp(fits) <= 2 * wrong.bound:
        factor = _plain(float(np.median(fits)), wrong.bound)
        text = f"gradients are {number_text(factor, 4)} times what they should be" if factor else "gradients are zero"
        cause = Cause("gradients scaled", text, hint=_numbers_text(wrong, factor), details=(("factor", factor),))
        yield cause, lambda d: factor * wrong.right(d)


def _scaled_apart(wrong: Wrong) -> Iterator[Way]:
    """A factor for each parameter, where that says far more than noise does."""
    if not all(math.isfinite(d.fit) and d.distance > CLEAR * d.bound for d in wrong.differences):
        return
    factors = {d.key: _plain(d.fit, d.bound) for d in wrong.differences}
    of: dict[str, list[str]] = {}
    for (_, _, fqn), factor in factors.items():
        of.setdefault(number_text(factor, 4), []).append(fqn)
    each = [f"{factor} ({names_text(tuple(fqns))})" for factor, fqns in sorted(of.items())]
    text = f"gradients are scaled by different factors: {', '.join(each[:FEW])}" + ", .." * (len(each) > FEW)
    details = (("factors", tuple(sorted({*factors.values()}))),)
    yield Cause("gradients scaled", text, details=details), lambda d: factors[d.key] * wrong.right(d)


def _of_the_step_before(wrong: Wrong) -> Iterator[Way]:
    """This step's gradients and those of the step before, each so many times in all that are wrong, by best fit."""
    step, keys = wrong.step, [(wrong.step - 1, GRADIENT, d.key[2]) for d in wrong.differences]
    if step == 1 or not all(key in wrong.one.whole for key in keys):
        return
    before = dict(zip([d.key for d in wrong.differences], (wrong.one.whole[key].sums for key in keys), strict=True))
    columns = np.stack([np.concatenate([*map(wrong.right, wrong.differences)]), np.concatenate([*before.values()])])
    target = np.concatenate([*map(wrong.seen, wrong.differences)])
    now, earlier = map(float, np.linalg.lstsq(columns.T, target, rcond=None)[0])
    text = (
        f"gradients are not zeroed: those of step {step} hold {number_text(earlier, 4)} times step {step - 1}'s as well"
    )
    cause = Cause("gradients not zeroed", text, details=(("factor", earlier),))
    if abs(now) <= wrong.bound:
        text = f"gradients of step {step} are {number_text(earlier, 4)} times those of step {step - 1}"
        cause = Cause("another tensor", text, details=(("of", "gradient"), ("back", 1), ("factor", earlier)))
    yield cause, lambda d: now * wrong.right(d) + earlier * before[d.key]


def _of_passes(wrong: Wrong) -> Iterator[Way]:
    """Passes of the first recording, each so many times."""
    if counted := counted_otherwise(wrong.one, wrong.other, wrong.step, wrong.bound):
        cause, sums = counted
        yield cause, lambda d: sums[d.key[2]]


def _of_other_parameters(wrong: Wrong) -> Iterator[Way]:
    """The gradient of one other parameter each, of the same shape, in this step or the one before."""
    whole, shapes, found = wrong.one.whole, wrong.one.shapes, dict[str, tuple[int, str]]()
    for d in wrong.differences:
        alike = [
            (step, fqn)
            for step, kind, fqn in whole
            if kind == GRADIENT and 0 <= wrong.step - step <= 1 and shapes[fqn] == shapes[d.key[2]]
            if apart(whole[step, kind, fqn].sums, wrong.seen(d))[0] <= d.bound
        ]
        if len(alike) != 1:
            return
        found[d.key[2]] = alike[0]
    first, (step, fqn) = next(iter(found.items()))
    text = f"gradients are those of other parameters: {first} has that of {fqn}"
    text += f" in step {step}" * (step != wrong.step) + f", and so {len(found) - 1} more" * (len(found) > 1)
    details = (("of", tuple((fqn, *source) for fqn, source in found.items())),)
    cause = Cause("another tensor", text, details=details)
    yield cause, lambda d: whole[(found[d.key[2]][0], GRADIENT, found[d.key[2]][1])].sums


def _rounded(wrong: Wrong) -> Cause | None:
    """In a float64 job all are off by less than float32 rounds."""
    exact = {*wrong.one.dtypes.values()} == {"float64"} and wrong.one.computes_in in ("", "float64")
    off = max(d.distance for d in wrong.differences)
    if not exact or wrong.step > 1 or not off < FLOAT32:
        return None
    hint = "no more than arithmetic in float32 rounds, and the first recording is in float64"
    return Cause("rounded", f"gradients are off by {off:.0e}", hint=hint, details=(("off", off),))


# ---- in words


def _plain(factor: float, close: float) -> float:
    """Return the plainest number that a factor is within the bound."""
    if abs(factor) <= close:
        return 0.0
    plain = float(round(factor)) if abs(factor) > 0.9 else 1 / round(1 / factor)
    return plain if math.isclose(plain, factor, rel_tol=max(close, 1e-9)) else factor


def _numbers_text(wrong: Wrong, factor: float) -> str:
    """Say which numbers of the two jobs the factor is. Equal numbers are no proof."""
    one, other = wrong.one.world, wrong.other.world
    known = {"the second one's ranks": other, "the first one's ranks": one, "the ratio of their ranks": other / one}
    for value, how in (
        (factor, "not divided by {} ({})"),
        (1 / (factor or math.nan), "divided an extra time by {} ({})"),
    ):
        names = [name for name, number in known.items() if number > 1 and math.isclose(number, value, rel_tol=1e-3)]
        if names:
            return f"as if {how.format(' or '.join(names), round(value))}"
    return ""
