"""Causes of wrong gradients in a recording: they may be sums of right ones, of which sketches are the same sums.

A wrong gradient may be a multiple of the right one, or that of another step or parameter. It may be a sum of these,
each rank's own part, or a sum in which passes count unequally. Each is assumed, and the recordings are judged again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from harness.core.causes.hypothesis import Broken, Fact, Hypothesis
from harness.core.evidence.text import names_text, number_text, ranks_text
from harness.core.judge.result import Cause
from harness.recording.judged.judge_sketched import Key
from harness.recording.judged.sketch_distances import TensorDistance, distance_and_fit, wrong_rows_text
from harness.recording.judged.sketched_passes import weights_of_passes
from harness.recording.judged.two_recordings import FEW, TwoRecordings
from harness.recording.sketches import GRADIENT, WEIGHTS

CHECK = "gradients"
FLOAT32 = 1e-6
"""What arithmetic in float32 rounds of a float64 gradient at most, relative to its norm."""
CLEAR = 4.0
"""Times its bound that a distance is no noise."""
Proposals = Iterator[Hypothesis[TwoRecordings]]


def wrong_gradients(evidence: TwoRecordings, broken: Broken) -> list[TensorDistance]:
    """Return the distances of wrong gradients of the first wrong step. Empty if gradients are not what is first wrong."""
    return evidence.wrong if CHECK in broken else []


def bound_of(wrong: list[TensorDistance]) -> float:
    """Return the largest distance that is no mistake, of any of them."""
    return max(distance.bound for distance in wrong)


# ---- what gradients may be


def unreduced_gradients(evidence: TwoRecordings, broken: Broken) -> Proposals:
    """Yield one hypothesis: gradients are not reduced over ranks, whose mean is the right gradient times one factor.

    Nothing if ranks have no different copies of a slice, or no one factor fits all parameters. It is "norms not summed"
    if only norm weights are wrong and the ranks' sum is right.
    """
    wrong = wrong_gradients(evidence, broken)
    ranks = _ranks_with_own(evidence)
    if not wrong or not ranks:
        return
    keys = [distance.key for distance in wrong]
    if not any(_copies_differ(evidence, distance) for distance in wrong):
        return
    means = {key: _mean_of_copies(evidence, key) for key in keys}
    fits = [distance_and_fit(evidence.expected_sketch(key), mean)[1] for key, mean in means.items()]
    if not all(map(math.isfinite, fits)) or np.ptp(fits) > 2 * bound_of(wrong):
        return
    factor = nearest_plain_number(float(np.median(fits)), bound_of(wrong))
    if not factor:
        return
    alike = _ranks_alike(evidence, keys)
    keep = f"{' '.join(map(ranks_text, alike))} have the same ones" if alike else "each keeps its own"
    text = f"gradients are not reduced over ranks {ranks_text(ranks)}: {keep}"
    details = (("ranks", tuple(ranks)), ("alike", tuple(alike)))
    cause = Cause("gradients not reduced", text, hint=_mean_text(factor, len(ranks)), details=details)
    if _is_near(factor * len(ranks), 1) and all("norm" in fqn for _, _, fqn in keys):
        text = f"gradients of norm weights are not summed over ranks {ranks_text(ranks)}"
        cause = Cause("norms not summed", text, details=details)
    reduced = {key: mean / factor for key, mean in means.items()}
    yield evidence.hypothesis(cause, lambda assumed: assumed.if_second_had(reduced), names=[key[2] for key in keys])


def _mean_text(factor: float, ranks: int) -> str:
    """Return which of the first recording's gradient the mean or sum of ranks' own gradients is. factor: of the mean."""
    if _is_near(factor, 1):
        return "their mean is the first recording's"
    if _is_near(factor * ranks, 1):
        return "their sum is the first recording's"
    return f"their mean is {number_text(factor, 4)} times the first recording's"


def _is_near(factor: float, wanted: float) -> bool:
    return math.isclose(factor, wanted, rel_tol=1e-9)


def scaled_gradients(evidence: TwoRecordings, broken: Broken) -> Proposals:
    """Yield one hypothesis: all wrong gradients are the right ones times one factor.

    Nothing if their factors differ.
    """
    wrong = wrong_gradients(evidence, broken)
    fits = [distance.fit for distance in wrong if math.isfinite(distance.fit)]
    if not fits or np.ptp(fits) > 2 * bound_of(wrong):
        return
    factor = nearest_plain_number(float(np.median(fits)), bound_of(wrong))
    text = f"gradients are {number_text(factor, 4)} times what they should be" if factor else "gradients are zero"
    cause = Cause("gradients scaled", text, hint=_factor_hint(evidence, factor), details=(("factor", factor),))
    sketches = {distance.key: factor * evidence.expected_sketch(distance.key) for distance in wrong}
    yield evidence.hypothesis(cause, lambda assumed: assumed.if_first_had(sketches), names=_names(wrong))


def separate_factors(evidence: TwoRecordings, broken: Broken) -> Proposals:
    """Yield one hypothesis: wrong gradients are scaled, each by its own factor of best fit.

    Nothing unless all of them are far beyond their bounds, which noise is not, and have finite factors.
    """
    wrong = wrong_gradients(evidence, broken)
    clear = [distance for distance in wrong if distance.distance > CLEAR * distance.bound]
    if not wrong or len(clear) < len(wrong) or not all(math.isfinite(distance.fit) for distance in wrong):
        return
    factors = {distance.key: nearest_plain_number(distance.fit, distance.bound) for distance in wrong}
    parameters: dict[str, list[str]] = {}
    for (_, _, fqn), factor in factors.items():
        parameters.setdefault(number_text(factor, 4), []).append(fqn)
    listed = [f"{factor} ({names_text(tuple(fqns))})" for factor, fqns in sorted(parameters.items())]
    text = f"gradients are scaled by different factors: {', '.join(listed[:FEW])}"
    if len(listed) > FEW:
        text += ", .."
    details = (("factors", tuple(sorted({*factors.values()}))),)
    sketches = {key: factor * evidence.expected_sketch(key) for key, factor in factors.items()}
    yield evidence.hypothesis(
        Cause("gradients scaled", text, details=details),
        lambda assumed: assumed.if_first_had(sketches),
        names=_names(wrong),
        fitted=1 + len(parameters),
    )


def gradients_of_step_before(evidence: TwoRecordings, broken: Broken) -> Proposals:
    """Yield one hypothesis: wrong gradients are a sum of this step's and the step before's, with two factors of best
    fit for all.

    Nothing in step 1, if an earlier gradient is not known, or if the earlier step has no part in it.
    """
    wrong = wrong_gradients(evidence, broken)
    step = evidence.step
    keys = [distance.key for distance in wrong]
    earlier_keys = [(step - 1, GRADIENT, fqn) for _, _, fqn in keys]
    if not wrong or step == 1 or not all(key in evidence.baseline.whole for key in earlier_keys):
        return
    own = np.concatenate([evidence.expected_sketch(key) for key in keys])
    before = np.concatenate([evidence.expected_sketch(key) for key in earlier_keys])
    target = np.concatenate([evidence.observed_sketch(key) for key in keys])
    if not np.isfinite(target).all():
        return
    times_own, times_before = map(float, np.linalg.lstsq(np.stack([own, before]).T, target, rcond=None)[0])
    if abs(times_before) <= bound_of(wrong):
        return
    sketches = {}
    for key, earlier in zip(keys, earlier_keys, strict=True):
        sketches[key] = times_own * evidence.expected_sketch(key) + times_before * evidence.expected_sketch(earlier)
    much = number_text(times_before, 4)
    details: tuple[tuple[str, object], ...] = (("factor", times_before),)
    kind = "gradients not zeroed"
    fitted = 2
    text = f"gradients are not zeroed: those of step {step} hold {much} times step {step - 1}'s as well"
    if abs(times_own) <= bound_of(wrong):
        kind = "another tensor"
        fitted = 1
        text = f"gradients of step {step} are {much} times those of step {step - 1}"
        details = (("of", "gradient"), ("back", 1), *details)
    elif abs(times_own - 1) > bound_of(wrong):
        text = f"gradients are not zeroed: those of step {step} are {number_text(times_own, 4)} times the right ones"
        text += f" and {much} times step {step - 1}'s"
    cause = Cause(kind, text, details=details)
    yield evidence.hypothesis(cause, lambda assumed: assumed.if_first_had(sketches), names=_names(wrong), fitted=fitted)


def unequally_counted_passes(evidence: TwoRecordings, broken: Broken) -> Proposals:
    """Yield one hypothesis: passes of the first recording count unequally in the gradients, each with a fitted weight.

    Nothing if passes were not recorded, cannot be distinguished, or count alike.
    """
    wrong = wrong_gradients(evidence, broken)
    if not wrong:
        return
    counted = weights_of_passes(evidence.baseline, evidence.candidate, evidence.step, bound_of(wrong))
    if counted is None:
        return
    cause, sums = counted
    sketches = {(evidence.step, GRADIENT, fqn): sketch for fqn, sketch in sums.items()}
    passes = len(evidence.baseline.passes[evidence.step][0])
    yield evidence.hypothesis(cause, lambda assumed: assumed.if_first_had(sketches), names=_names(wrong), fitted=passes)


def gradients_of_other_parameters(evidence: TwoRecordings, broken: Broken) -> Proposals:
    """Yield one hypothesis: each wrong gradient is that of one other parameter of its shape, in this step or the one
    before.

    Nothing unless exactly one such gradient fits each wrong one.
    """
    sources: dict[Key, Key] = {}
    for distance in wrong_gradients(evidence, broken):
        alike = [key for key in _candidates(evidence, distance.key) if _is_equal(evidence, key, distance)]
        if len(alike) != 1:
            return
        sources[distance.key] = alike[0]
    if not sources:
        return
    (_, _, fqn), (step, _, source) = next(iter(sources.items()))
    text = f"gradients are those of other parameters: {fqn} has that of {source}"
    if step != evidence.step:
        text += f" in step {step}"
    if len(sources) > 1:
        text += f", and so {len(sources) - 1} more"
    details = (("of", tuple((key[2], of_step, name) for key, (of_step, _, name) in sources.items())),)
    sketches = {key: evidence.expected_sketch(other) for key, other in sources.items()}
    yield evidence.hypothesis(
        Cause("another tensor", text, details=details),
        lambda assumed: assumed.if_first_had(sketches),
        names=[key[2] for key in sources],
    )


def _candidates(evidence: TwoRecordings, wanted: Key) -> Iterator[Key]:
    """Yield other parameters' gradients of the same shape in the first recording, of the same step or the one before."""
    shapes = evidence.baseline.shapes
    for key in evidence.baseline.whole:
        step, kind, fqn = key
        alike = fqn != wanted[2] and shapes[fqn] == shapes[wanted[2]]
        if kind == GRADIENT and step in (wanted[0], wanted[0] - 1) and alike:
            yield key


def _is_equal(evidence: TwoRecordings, key: Key, distance: TensorDistance) -> bool:
    return distance_and_fit(evidence.expected_sketch(key), evidence.observed_sketch(distance.key))[0] <= distance.bound


def _ranks_with_own(evidence: TwoRecordings) -> list[int]:
    """Return the ranks that have different copies of a slice, as the findings of the first wrong step name them, ascending."""
    ranks: set[int] = set()
    for finding in evidence.first.findings:
        if finding.step == evidence.step:
            ranks.update(finding.ranks)
    return sorted(ranks)


def _copies_differ(evidence: TwoRecordings, distance: TensorDistance) -> bool:
    """Return whether copies of a slice of the tensor differ by more than the bound."""
    for copies in evidence.copies(distance.key).values():
        if any(not distance_and_fit(copies[0][1], sums)[0] <= distance.bound for _, sums in copies):
            return True
    return False


def _mean_of_copies(evidence: TwoRecordings, key: Key) -> np.ndarray:
    """Return the sketch of a tensor in which each slice is the mean of the copies that ranks have of it. float64 [BUCKETS]"""
    total = evidence.observed_sketch(key).copy()
    for copies in evidence.copies(key).values():
        total += np.mean([sums for _, sums in copies], axis=0) - copies[0][1]
    return total


def _ranks_alike(evidence: TwoRecordings, keys: list[Key]) -> list[tuple[int, ...]]:
    """Return the sets of several ranks that hold the same slices with the same numbers, ascending; empty if each has
    its own."""
    alike: dict[int, set[int]] = {}
    for key in keys:
        for copies in evidence.copies(key).values():
            for rank, sums in copies:
                same = {other for other, theirs in copies if distance_and_fit(sums, theirs)[0] <= FLOAT32}
                alike[rank] = alike.get(rank, same) & same
    return sorted({tuple(sorted(ranks)) for ranks in alike.values() if len(ranks) > 1})


# ---- what is seen of gradients


def not_finite(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact: gradients of the first wrong step hold NaN or infinity. Nothing if none does."""
    if CHECK not in broken:
        return
    odd = [fqn for fqn in evidence.names if _is_not_finite(evidence, (evidence.step, GRADIENT, fqn))]
    if odd:
        text = f"gradients of step {evidence.step} are NaN or infinite"
        yield _fact(evidence, Cause("not finite", text, evidence.parameters_text(odd)))


def no_gradients(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact: parameters have no gradient in the first wrong step.

    Nothing unless all findings of the step are of these.
    """
    if CHECK not in broken:
        return
    of_step = [finding for finding in broken[CHECK].findings if finding.step == evidence.step]
    none = {finding.name for finding in of_step if finding.observed == "none"}
    if none and none == {*evidence.names}:
        text = f"no gradient comes in step {evidence.step}"
        yield _fact(evidence, Cause("incomplete", text, evidence.parameters_text(evidence.names)))


def zero_gradients(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact: all wrong gradients are zero. Nothing if any of them has another number."""
    wrong = wrong_gradients(evidence, broken)
    if wrong and not any(evidence.observed_sketch(distance.key).any() for distance in wrong):
        where = evidence.parameters_text(_names(wrong))
        yield _fact(evidence, Cause("gradients scaled", "gradients are zero", where, details=(("factor", 0.0),)))


def rounded_gradients(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact: gradients of a float64 job are off by less than float32 rounds.

    Only in step 1, and if no copies differ.
    """
    wrong = wrong_gradients(evidence, broken)
    exact = {*evidence.baseline.dtypes.values()} == {"float64"} and evidence.baseline.computes_in in ("", "float64")
    if not wrong or not exact or evidence.step > 1 or any(evidence.copies(distance.key) for distance in wrong):
        return
    off = max(distance.distance for distance in wrong)
    if off < FLOAT32:
        hint = "no more than arithmetic in float32 rounds, and the first recording is in float64"
        where = evidence.parameters_text(_names(wrong))
        yield _fact(
            evidence, Cause("rounded", f"gradients are off by {off:.0e}", where, hint=hint, details=(("off", off),))
        )


def changed_between_steps(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact: weights are others as the wrong step begins than they were after the step before.

    Nothing if the first recording's changed there as well, or if its weights after the step before were not recorded.
    """
    step = evidence.step
    changed = evidence.candidate.changed.get(step, ())
    looked = any(key[:2] == (step - 1, WEIGHTS) for key in evidence.baseline.whole)
    if CHECK in broken and looked and changed and not evidence.baseline.changed.get(step):
        text = f"weights are others as step {step} begins than they were after step {step - 1}"
        details = (("step", step), ("parameters", changed))
        where = evidence.parameters_text(changed)
        yield Fact(Cause("weights changed between steps", text, where, details=details), (CHECK,))


def random_state(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact: ranks of a resumed job draw other random numbers than those of the first recording.

    Else nothing.
    """
    ranks, hint = other_draws(evidence)
    if CHECK in broken and ranks and evidence.baseline.after:
        where = evidence.parameters_text(evidence.names)
        cause = Cause(
            "random state not restored", place_text(evidence.step), where, hint=hint, details=(("ranks", ranks),)
        )
        yield _fact(evidence, cause)


def other_draws(evidence: TwoRecordings) -> tuple[tuple[int, ...], str]:
    """Return the ranks whose generators stand elsewhere than the same rank's of the first recording, and a hint in
    words.

    Only ranks whose pass draws random numbers count. Both are empty where the passes of either recording draw none, or
    all stand alike. If the recordings are of other ranks, only the hint is given.
    """
    expected = evidence.baseline.drawn.get(evidence.step, {})
    observed = evidence.candidate.drawn.get(evidence.step, {})
    drawing = [rank for rank, (begin, end) in observed.items() if begin != end]
    if not drawing or all(begin == end for begin, end in expected.values()):
        return (), ""
    hint = "forward passes draw random numbers, as dropout does"
    if expected.keys() != observed.keys():
        return (), f"{hint}, and other ranks draw others: leave it out of both"
    odd = tuple(sorted(rank for rank in drawing if observed[rank][0] != expected[rank][0]))
    return odd, f"{hint}, and generators stand elsewhere on ranks {ranks_text(odd)}" if odd else ""


def _fact(evidence: TwoRecordings, cause: Cause) -> Fact:
    """Return the fact with the step and the parameters that are wrong in it."""
    details = (*cause.details, ("step", evidence.step), ("parameters", tuple(evidence.names)))
    return Fact(Cause(cause.kind, cause.observed, cause.where, hint=cause.hint, details=details), (CHECK,))


def _is_not_finite(evidence: TwoRecordings, key: Key) -> bool:
    return key in evidence.candidate.whole and not math.isfinite(evidence.candidate.whole[key].length)


# ---- where they are wrong, if that is all that is known


def place_text(step: int) -> str:
    """Return from when on gradients are wrong."""
    return f"gradients, or weights before them, are wrong from step {step} on" if step > 1 else "gradients are wrong"


def located_gradients(evidence: TwoRecordings) -> Cause:
    """Return the cause "not explained": the first step with wrong gradients, the parameters, and what is seen beside
    them.

    That is a block of rows, unequal copies, no optimizer, or other random numbers.
    """
    step = evidence.step
    names = evidence.names
    where = evidence.parameters_text(names)
    wrong = evidence.wrong
    if len(wrong) == 1 == len(names):
        rows = wrong_rows_text(evidence.baseline, evidence.candidate, wrong[0])
        where = ", ".join(filter(None, (where, rows)))
    hint = ""
    if step > 1 and not any(key[0] and key[1] == WEIGHTS for key in evidence.candidate.whole):
        hint = "no optimizer was seen to step on any of them"
    if ranks := _ranks_with_own(evidence):
        of_step = [finding for finding in evidence.first.findings if finding.step == step and finding.ranks]
        unequal = list(dict.fromkeys(finding.name for finding in of_step))
        hint = f"ranks {ranks_text(ranks)} have different ones of the same slice {evidence.parameters_text(unequal)}"
    drawn, why = other_draws(evidence)
    details: tuple[tuple[str, object], ...] = (("place", CHECK), ("step", step), ("parameters", tuple(names)))
    if drawn:
        details += (("ranks", drawn),)
    return Cause("not explained", place_text(step), where, hint=hint or why, details=details)


# ---- in words


def nearest_plain_number(factor: float, close: float) -> float:
    """Return the integer, or the inverse of an integer, that a factor is within the bound; the factor itself if
    there is none."""
    if factor == 0 or not math.isfinite(1 / factor):  # of the smallest numbers, the inverse is infinite
        return factor
    plain = float(round(factor)) if abs(factor) > 0.9 else 1 / round(1 / factor)
    return plain if math.isclose(plain, factor, rel_tol=max(close, 1e-9)) else factor


def _names(wrong: list[TensorDistance]) -> list[str]:
    return [distance.key[2] for distance in wrong]


def _factor_hint(evidence: TwoRecordings, factor: float) -> str:
    """Return to which numbers of ranks of the two jobs the factor points; empty if to none.

    Equal numbers are no proof.
    """
    first = evidence.baseline.world
    second = evidence.candidate.world
    known = {
        "the second one's ranks": second,
        "the first one's ranks": first,
        "the ratio of their ranks": second / first,
    }
    inverse = 1 / (factor or math.nan)
    for value, how in ((factor, "not divided by {} ({})"), (inverse, "divided an extra time by {} ({})")):
        names = [name for name, number in known.items() if number > 1 and math.isclose(number, value, rel_tol=1e-3)]
        if names:
            return f"as if {how.format(' or '.join(names), round(value))}"
    return ""
