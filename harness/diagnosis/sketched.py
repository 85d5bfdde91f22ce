"""Why two recordings are not the same training: the first thing that differs, and what it is where sketches show it.

Sketches are linear, so some wrong gradients are found without the tensors. Such a gradient is a multiple of the right one, that
of another step, a sum of two, or each rank's own part. Its sketch is that sum of sketches, for all parameters alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from harness.evidence.sketches import GRADIENT
from harness.evidence.text import number_text, ranks_text
from harness.judge.result import Cause, Result, Verdict
from harness.judge.same_training import Comparison, without_padding
from harness.judge.sketch_distances import OF_UPDATES, Difference, apart
from harness.judge.sketched import Numbers

KIND = "not explained"
FEW = 3
Sums = Callable[[Difference], "np.ndarray | None"]
"""What the second recording's sketch would be."""


def cause_of(one: Numbers, other: Numbers, found: Comparison) -> Cause | None:
    """Return the first thing that differs; None where nothing does. What follows from it is in `explains`."""
    failed = [result for result in found.results if result.verdict is Verdict.FAIL]
    if not failed:
        return None
    looks = {
        "initial_weights": _weights,
        "samples": _samples,
        "recipe": _recipe,
        "gradients": _gradients,
        "grad_norm": _norm,
        "optimizer_state": _stepped,
        "update": _stepped,
    }
    first = min(failed, key=lambda result: (_first_step(result), [*looks].index(result.check)))
    cause = looks[first.check](one, other, found, first)
    later = [result.check for result in failed if result is not first and _first_step(result) >= _first_step(first)]
    return replace(cause, explains=(first.check, *later))


def _first_step(result: Result) -> int:
    return min((finding.step or 0 for finding in result.findings), default=0)


def _names(result: Result, step: int) -> list[str]:
    names = (one.name for one in result.findings if one.kind == "parameter" and (one.step or 0) == step)
    return list(dict.fromkeys(names))


def _in(names: Sequence[str], numbers: Numbers) -> str:
    if {*names} == {*numbers.shapes}:
        return "in every parameter"
    more = f" and {len(names) - FEW} more" * (len(names) > FEW)
    return f"in {len(names)} of {len(numbers.shapes)} parameters ({', '.join(names[:FEW])}{more})"


# ---- what goes in


def _weights(one: Numbers, other: Numbers, found: Comparison, result: Result) -> Cause:
    names = _names(result, 0)
    text = "training does not start from the first recording's weights"
    hint = "load the same checkpoint in both, or draw weights by a seed that does not depend on the rank"
    return Cause("other initial weights", text, _in(names, one), hint=hint, details=(("parameters", tuple(names)),))


def _samples(one: Numbers, other: Numbers, found: Comparison, result: Result) -> Cause:
    step = _first_step(result)
    mine, theirs = without_padding(one, other, step)
    often = min(theirs.values()) // max(min(mine.values()), 1)
    details = (("step", step),)
    if {*theirs} < {*mine} and often > 1 and all(count == often * mine[row] for row, count in theirs.items()):
        different, as_often = (" different", " as often") if max(mine.values()) > 1 else ("", "")
        text = f"of {len(mine)}{different} rows of step {step}, {len(theirs)} are fed, each {often} times{as_often},"
        text += " and the others to no rank"
        hint = "give each data-parallel rank its own share of the first recording's batch"
        return Cause("same samples", text, hint=hint, details=details)
    for at, rows in sorted(one.rows.items()):
        if at != step and _alike(rows, theirs):
            text = f"step {step} receives the samples of step {at}"
            return Cause("data position", text, details=(*details, ("of_step", at)))
    every = {row for rows in one.rows.values() for row in rows}
    text = f"samples of step {step} are others than the first recording's"
    hint = "set the sampler's seed and the batch per rank so that both train on the same global batch"
    kind = "samples dealt otherwise" if {*theirs} <= every else "samples of no step"
    return Cause(kind, text, hint=hint, details=details)


def _alike(one: Counter[int], other: Counter[int]) -> bool:
    least = [max(min(of.values(), default=1), 1) for of in (one, other)]
    return {row: n // least[0] for row, n in one.items()} == {row: n // least[1] for row, n in other.items()}


def _recipe(one: Numbers, other: Numbers, found: Comparison, result: Result) -> Cause:
    finding = result.findings[0]
    kind = "learning rate" if finding.name == "learning rate" else "another recipe"
    return Cause(kind, "", finding=finding)


# ---- gradients


def _gradients(one: Numbers, other: Numbers, found: Comparison, result: Result) -> Cause:
    step = _first_step(result)
    names = _names(result, step)
    wrong = [d for d in found.differences if d.key[:2] == (step, GRADIENT) and (d.is_wrong or d.key[2] in names)]
    apart_on = sorted({rank for of in result.findings if of.step == step for rank in of.ranks})
    where = _in(names, one)
    for cause, sums in _ways(one, other, step, apart_on, wrong):
        if wrong and all(_is(other, d, sums) for d in wrong):
            return replace(cause, where=where, details=(*cause.details, ("step", step), ("parameters", tuple(names))))
    text = f"gradients are wrong from step {step} on" if step > 1 else "gradients are wrong"
    if apart_on:
        text += f", and ranks {ranks_text(apart_on)} have different ones of the same slice"
    return Cause(KIND, text, where, details=(("place", "gradients"), ("step", step), ("parameters", tuple(names))))


def _is(other: Numbers, difference: Difference, sums: Sums) -> bool:
    wanted = sums(difference)
    if wanted is None:
        return False
    return apart(wanted, other.whole[difference.key].sums)[0] <= difference.bound


def _ways(
    one: Numbers, other: Numbers, step: int, ranks: Sequence[int], wrong: Sequence[Difference]
) -> Iterator[tuple[Cause, Sums]]:
    """Yield what gradients may be, and the sketch that the second recording then has."""

    def right(d: Difference) -> np.ndarray:
        return one.whole[d.key].sums

    if ranks:
        for factor in (1.0, 1.0 / len(ranks), float(len(ranks))):
            text = f"gradients are not reduced over ranks {ranks_text([*ranks])}: each keeps its own"
            hint = f"their {'mean' if factor == 1 else 'sum'} is the first recording's" if factor <= 1 else ""
            cause = Cause("gradients not reduced", text, hint=hint, details=(("ranks", tuple(ranks)),))
            if wrong and all(_mean_is(other, d, factor * right(d)) for d in wrong):
                yield cause, lambda d: other.whole[d.key].sums
        return
    fits = [d.fit for d in wrong if math.isfinite(d.fit)]
    if fits and np.ptp(fits) <= 2 * max(d.bound for d in wrong):
        factor = _plain(float(np.median(fits)), max(d.bound for d in wrong))
        text = f"gradients are {number_text(factor, 4)} times what they should be" if factor else "gradients are zero"
        hint = _numbers_text(one, other, factor)
        yield (
            Cause("gradients scaled", text, hint=hint, details=(("factor", factor),)),
            lambda d: factor * right(d),
        )
    if shares := _shares(one, other, step, wrong):
        now, earlier = shares
        text = f"gradients are not zeroed: those of step {step} hold {number_text(earlier, 4)} times step {step - 1}'s as well"
        cause = Cause("gradients not zeroed", text, details=(("factor", earlier),))
        if abs(now) <= max(d.bound for d in wrong):
            text = f"gradients of step {step} are {number_text(earlier, 4)} times those of step {step - 1}"
            cause = Cause("another tensor", text, details=(("of", "gradient"), ("back", 1), ("factor", earlier)))
        yield cause, lambda d: now * right(d) + earlier * _before(one, d)


def _before(one: Numbers, difference: Difference) -> np.ndarray:
    step, kind, fqn = difference.key
    return one.whole[step - 1, kind, fqn].sums


def _shares(one: Numbers, other: Numbers, step: int, wrong: Sequence[Difference]) -> tuple[float, float] | None:
    """Return how often this step's gradients and those of the step before count in all that are wrong, by best fit."""
    if step == 1 or not wrong or not all((step - 1, GRADIENT, d.key[2]) in one.whole for d in wrong):
        return None
    columns = np.stack(
        [np.concatenate([one.whole[d.key].sums for d in wrong]), np.concatenate([_before(one, d) for d in wrong])]
    )
    target = np.concatenate([other.whole[d.key].sums for d in wrong])
    if not np.isfinite(target).all():
        return None
    now, earlier = np.linalg.lstsq(columns.T, target, rcond=None)[0]
    return float(now), float(earlier)


def _mean_is(other: Numbers, difference: Difference, wanted: np.ndarray) -> bool:
    """Whether the mean of what holders of each slice have is this."""
    whole = other.whole[difference.key]
    total = whole.sums.copy()
    for held in whole.replicas.values():
        total += np.mean([sums for _, sums in held], axis=0) - held[0][1]
    return apart(wanted, total)[0] <= difference.bound


def _plain(factor: float, close: float) -> float:
    """Return the plainest number that a factor is within the bound."""
    if abs(factor) <= close:
        return 0.0
    plain = float(round(factor)) if abs(factor) > 0.9 else 1 / round(1 / factor)
    return plain if math.isclose(plain, factor, rel_tol=max(close, 1e-9)) else factor


def _numbers_text(one: Numbers, other: Numbers, factor: float) -> str:
    """Say which numbers of the two jobs the factor is. Equal numbers are no proof."""
    known: dict[str, float] = {"the second one's ranks": other.world, "the first one's ranks": one.world}
    known["the ratio of their ranks"] = other.world / one.world
    for value, how in (
        (factor, "not divided by {} ({})"),
        (1 / (factor or math.nan), "divided an extra time by {} ({})"),
    ):
        names = [name for name, number in known.items() if number > 1 and math.isclose(number, value, rel_tol=1e-3)]
        if names:
            return f"as if {how.format(' or '.join(names), round(value))}"
    return ""


# ---- behind gradients


def _norm(one: Numbers, other: Numbers, found: Comparison, result: Result) -> Cause:
    finding = result.findings[0]
    ranks = sorted({rank for of in result.findings for rank in of.ranks})
    text = "gradients are clipped by another norm than that of all gradients"
    where, details = f"on ranks {ranks_text(ranks)}", (("step", finding.step), ("ranks", tuple(ranks)))
    return Cause("clipped by another norm", text, where, finding=finding, details=details)


def _stepped(one: Numbers, other: Numbers, found: Comparison, result: Result) -> Cause:
    """What the optimizer makes of gradients that are right."""
    step, names = _first_step(result), _names(result, _first_step(result))
    kinds = [d for d in found.differences if d.is_wrong and d.key[0] == step and d.key[1] != GRADIENT]
    of_state = [d for d in kinds if d.key[1] != OF_UPDATES] if result.check == "optimizer_state" else kinds
    fits = [d.fit for d in of_state if d.key[1] == of_state[0].key[1] and math.isfinite(d.fit)] if of_state else []
    what = "optimizer's state" if result.check == "optimizer_state" else "update"
    text = f"the {what} is wrong {_in(names, one)}" + f" from step {step} on" * (step > 1)
    text += ", gradients before clipping are right"
    hint = ""
    if fits and np.ptp(fits) <= 2 * max(d.bound for d in of_state):
        factor = number_text(float(np.median(fits)), 4)
        hint = f"{of_state[0].key[1]} is {factor} times the first recording's"
    details = (("place", what), ("step", step), ("parameters", tuple(names)))
    return Cause(KIND, text, hint=hint, details=details)
