"""Causes of a wrong optimizer step whose gradients are right, where two recordings differ in it.

An average of gradients is linear in them, as sketches are. In step 1 it is the gradient times what clipping multiplies
it by, and times a number of the optimizer's settings. What decay adds is a multiple of the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from harness.core.causes.hypothesis import Broken, Fact, Hypothesis
from harness.core.evidence.text import number_text, ranks_text
from harness.core.judge.result import Cause, Lines
from harness.recording.judged.judge_sketched import Key, Numbers
from harness.recording.judged.sketch_distances import OF_UPDATES, TensorDistance, distance_and_fit
from harness.recording.judged.two_recordings import TwoRecordings
from harness.recording.sketches import GRADIENT, WEIGHTS

STATE = "optimizer_state"
UPDATE = "update"
AVERAGES = ("exp_avg", "momentum_buffer")
"""Keys of averages of gradients in an optimizer's state."""
SQUARES = ("exp_avg_sq", "max_exp_avg_sq")
"""Keys of averages of squares of gradients."""
MOST_DECAY = 0.2
"""Part of the weights that weight decay takes in a step at most."""
STILL = 1e-12
"""Square of an update, relative to the first recording's, that is none."""
BETA1 = re.compile(r"betas \(([0-9.]+),")


# ---- what a step may have done


def other_clipping(evidence: TwoRecordings, broken: Broken) -> Iterator[Hypothesis[TwoRecordings]]:
    """Yield one hypothesis: gradients were clipped by another factor, for in step 1 their averages are other multiples
    of them.

    Nothing in other steps, or if an average is not a known multiple of its gradient in both recordings.
    """
    if STATE not in broken or evidence.step != 1:
        return
    if evidence.candidate.rescaled.get(1) and not evidence.baseline.norms.get(1):
        return  # the first recording's gradients are seen after clipping, so its factor is not known
    averages = [distance for distance in evidence.wrong if distance.key[1] in AVERAGES]
    factors: dict[str, tuple[float, float]] = {}
    for average in averages:
        expected = multiple_of_gradient(evidence.baseline, average)
        observed = multiple_of_gradient(evidence.candidate, average)
        if not expected or observed is None:
            return
        factors[average.key[2]] = expected, observed
    if not factors:
        return
    bound = max(distance.bound for distance in averages)
    cause = _clipping(factors, bound)
    observed_factors = [observed for _, observed in factors.values()]
    alike = max(observed_factors) - min(observed_factors) <= 2 * bound * max(observed_factors)
    sketches = _clipped_state(evidence, factors)
    yield evidence.hypothesis(
        cause,
        lambda assumed: assumed.if_first_had(sketches),
        names=factors,
        fitted=1 if alike else len(factors),
    )


def _clipped_state(evidence: TwoRecordings, factors: Mapping[str, tuple[float, float]]) -> dict[Key, np.ndarray]:
    """Return by key the first recording's state as if its gradients had been multiplied as the second one's are.

    factors: fqn -> multiples in the first and the second recording.
    """
    sketches: dict[Key, np.ndarray] = {}
    for key in (distance.key for distance in evidence.distances):
        if key[2] not in factors:
            continue
        expected, observed = factors[key[2]]
        ratio = observed / expected
        if key[1] in AVERAGES:
            sketches[key] = ratio * evidence.expected_sketch(key)
        elif key[1] in SQUARES:
            sketches[key] = ratio**2 * evidence.expected_sketch(key)
    return sketches


def multiple_of_gradient(numbers: Numbers, average: TensorDistance) -> float | None:
    """Return the factor by which a gradient of step 1 was multiplied before it came into its average.

    None where not known. None as well if the average is no multiple of the gradient.
    """
    _, kind, fqn = average.key
    taken = _part_taken(numbers, kind)
    gradient = numbers.whole.get((1, GRADIENT, fqn))
    if taken is None or gradient is None:
        return None
    sums = numbers.whole[average.key].sums
    multiple = distance_and_fit(gradient.sums, sums)[1]
    is_multiple = distance_and_fit(multiple * gradient.sums, sums)[0] <= average.bound
    return multiple / taken if is_multiple else None


def _part_taken(numbers: Numbers, kind: str) -> float | None:
    """Return the part of a gradient that is in an average after step 1, such as 1 - beta1.

    None where settings do not say.
    """
    if len(numbers.optimizers) != 1:
        return None
    if kind == "momentum_buffer":
        return 1.0 if numbers.optimizers[0].startswith("SGD(") else None
    beta = BETA1.search(numbers.optimizers[0])
    return 1 - float(beta[1]) if beta else None


def _clipping(factors: Mapping[str, tuple[float, float]], bound: float) -> Cause:
    """Return the cause: another norm, clipping left out, or gradients enlarged.

    factors: fqn -> what gradients are multiplied by in the first and the second recording, after they were seen.
    """
    observed = [multiple for _, multiple in factors.values()]
    right, seen = next(iter(factors.values()))
    digits = next(number for number in (4, 8, 17) if number > 8 or _differ_in_digits(right, seen, number))
    details = (("expected", right), ("factors", tuple(observed)))
    kind = "clipped by another norm"
    how = f"multiplied by {number_text(seen, digits)}"
    if max(observed) - min(observed) > 2 * bound * max(observed):
        how = f"multiplied by {number_text(min(observed), 4)} to {number_text(max(observed), 4)}"
    elif math.isclose(seen, 1, rel_tol=min(bound, 0.01)) and right < 1:
        kind = "clipping left out"
        how = "as they are"
    elif seen > 1:
        kind = "clipping enlarges gradients"
    text = f"gradients reach the optimizer {how}, the first recording's multiplied by {number_text(right, digits)}"
    return Cause(kind, text, details=details)


def _differ_in_digits(first: float, second: float, digits: int) -> bool:
    return number_text(first, digits) != number_text(second, digits)


def other_weight_decay(evidence: TwoRecordings, broken: Broken) -> Iterator[Hypothesis[TwoRecordings]]:
    """Yield one hypothesis: an update or an average of gradients is off by a multiple of the weights before the step.

    Nothing if these weights are not known, or if the multiple is above MOST_DECAY. Squares of gradients are left out
    under the assumption, and a line says so.
    """
    wrong = evidence.wrong if {STATE, UPDATE} & {*broken} else []
    keys = [distance.key for distance in wrong if distance.key[1] == wrong[0].key[1]]
    before = {key: (evidence.step - 1, WEIGHTS, key[2]) for key in keys}
    known = evidence.baseline.whole.keys() & evidence.candidate.whole.keys()
    if not keys or not known.issuperset(before.values()):
        return
    kind = keys[0][1]
    compared = {key: (evidence.step, WEIGHTS, key[2]) if kind == OF_UPDATES else key for key in keys}
    weights = np.concatenate([evidence.expected_sketch(before[key]) for key in keys])
    off = np.concatenate(
        [evidence.observed_sketch(compared[key]) - evidence.expected_sketch(compared[key]) for key in keys]
    )
    if kind == OF_UPDATES:
        off -= np.concatenate(
            [evidence.observed_sketch(before[key]) - evidence.expected_sketch(before[key]) for key in keys]
        )
    times = float(off @ weights / (weights @ weights or 1.0))
    if not abs(times) <= MOST_DECAY:
        return
    sketches = {
        compared[key]: evidence.expected_sketch(compared[key]) + times * evidence.expected_sketch(before[key])
        for key in keys
    }
    much = f"{number_text(times, 4)} times the weights in addition"
    cause = Cause("weight decay", f"weights decay otherwise: what the step adds has {much}")
    if kind != OF_UPDATES:
        cause = Cause("weight decay in the gradients", f"weight decay is added to gradients: {kind} has {much}")
    names = [key[2] for key in keys]
    squares = [distance.key for distance in wrong if distance.key[1] in SQUARES and distance.key[2] in names]
    lines: Lines = (
        (("not tested", f"{squares[0][1]}: squares of a sum do not follow from sketches"),) if squares else ()
    )
    yield evidence.hypothesis(
        Cause(cause.kind, cause.observed, details=(("times", times),)),
        lambda assumed: assumed.if_first_had(sketches).without_tensors(squares),
        names=names,
        lines=lines,
    )


# ---- what is seen of a step


def not_stepped(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact: updates of the first wrong step are zero. Nothing unless all that are wrong are so."""
    check = next((check for check in (STATE, UPDATE) if check in broken), "")
    updates = [
        distance for distance in evidence.comparison.differences if distance.key[:2] == (evidence.step, OF_UPDATES)
    ]
    moved = [distance for distance in updates if distance.is_wrong]
    if check and moved and all(_is_still(distance) for distance in moved):
        names = tuple(distance.key[2] for distance in moved)
        details = (("place", "update"), ("step", evidence.step), ("parameters", names))
        text = f"the optimizer has no effect in step {evidence.step}"
        yield Fact(Cause("not stepped", text, evidence.parameters_text(names), details=details), (check,))


def _is_still(update: TensorDistance) -> bool:
    """Say whether the second recording's update is zero: its square follows from the distance and the fit."""
    return abs(update.distance**2 - 1 + 2 * update.fit) < STILL


def other_norm(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact: torch's clipping function returned another norm than that of all gradients, on these ranks.

    Nothing if the check of norms passes.
    """
    if "grad_norm" not in broken:
        return
    findings = broken["grad_norm"].findings
    ranks = sorted(set[int]().union(*(finding.ranks for finding in findings)))
    text = "gradients are clipped by another norm than that of all gradients"
    details = (("step", findings[0].step), ("ranks", tuple(ranks)))
    where = f"on ranks {ranks_text(ranks)}"
    yield Fact(Cause("clipped by another norm", text, where, finding=findings[0], details=details), ("grad_norm",))


# ---- where a step is wrong, if that is all that is known


def located_step(evidence: TwoRecordings) -> Cause:
    """Return the cause "not explained": the first step whose state or update is wrong, its parameters, and a factor
    that fits."""
    step = evidence.step
    names = evidence.names
    part = "optimizer's state" if evidence.first.check == STATE else "update"
    text = f"the {part} is wrong {evidence.parameters_text(names)}"
    if step > 1:
        text += f" from step {step} on"
    text += ", gradients " + ("have one factor" if step in evidence.candidate.rescaled else "before clipping are right")
    details = (("place", part), ("step", step), ("parameters", tuple(names)))
    return Cause("not explained", text, hint=_factor_text(evidence.wrong), details=details)


def _factor_text(wrong: Sequence[TensorDistance]) -> str:
    """Return the one factor of all wrong tensors of the first wrong kind, in words; empty if they have none in common."""
    alike = [distance for distance in wrong if distance.key[1] == wrong[0].key[1]]
    fits = [distance.fit for distance in alike if math.isfinite(distance.fit)]
    if not fits or np.ptp(fits) > 2 * max(distance.bound for distance in wrong):
        return ""
    return f"{wrong[0].key[1]} is {number_text(float(np.median(fits)), 4)} times the first recording's"
