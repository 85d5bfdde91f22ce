"""What an optimizer makes of gradients that are right, where two recordings differ in it.

An average of gradients is linear in them, as sketches are. In step 1 it is the gradient times what clipping multiplies it by,
and times a number of the optimizer's settings. What decay adds is a multiple of the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from harness.core.evidence.text import number_text, ranks_text
from harness.core.judge.result import Cause, Result
from harness.recording.judged.judge_same_training import Comparison
from harness.recording.judged.judge_sketched import Key, Numbers
from harness.recording.judged.sketch_distances import OF_UPDATES, TensorDistance, apart
from harness.recording.judged.sketched_gradients import in_words
from harness.recording.judged.sketched_resumed import AVERAGES, new_state
from harness.recording.sketches import GRADIENT, WEIGHTS

MOST_DECAY = 0.2
"""Part of the weights that weight decay takes in a step at most."""
STILL = 1e-12
"""Square of an update, relative to the first recording's, that is none."""
BETA1 = re.compile(r"betas \(([0-9.]+),")


def other_norm(one: Numbers, other: Numbers, found: Comparison, result: Result) -> Cause:
    finding = result.findings[0]
    ranks = sorted({rank for of in result.findings for rank in of.ranks})
    text = "gradients are clipped by another norm than that of all gradients"
    where, details = f"on ranks {ranks_text(ranks)}", (("step", finding.step), ("ranks", tuple(ranks)))
    return Cause("clipped by another norm", text, where, finding=finding, details=details)


def stepped_otherwise(one: Numbers, other: Numbers, found: Comparison, result: Result) -> Cause:
    """What the optimizer makes of gradients that are right."""
    step = min((finding.step or 0 for finding in result.findings), default=0)
    of_step = (
        finding.name for finding in result.findings if finding.kind == "parameter" and (finding.step or 0) == step
    )
    names = list(dict.fromkeys(of_step))
    kinds = [d for d in found.differences if d.is_wrong and d.key[0] == step and d.key[1] != GRADIENT]
    of_state = [d for d in kinds if d.key[1] != OF_UPDATES] if result.check == "optimizer_state" else kinds
    moved = {d.key[2]: d for d in kinds if d.key[1] == OF_UPDATES}
    if moved and all(abs(d.distance**2 - 1 + 2 * d.fit) < STILL for d in moved.values()):
        details = (("place", "update"), ("step", step), ("parameters", tuple(moved)))
        return Cause(
            "not stepped", f"the optimizer has no effect in step {step}", in_words([*moved], one), details=details
        )
    if cause := new_state(one, other, of_state):
        return cause
    if cause := _clipped(one, other, of_state) or _decayed(one, other, of_state):
        return replace(cause, where=cause.where or in_words(names, one), details=(*cause.details, ("step", step)))
    fits = [d.fit for d in of_state if d.key[1] == of_state[0].key[1] and math.isfinite(d.fit)] if of_state else []
    what = "optimizer's state" if result.check == "optimizer_state" else "update"
    text = f"the {what} is wrong {in_words(names, one)}" + f" from step {step} on" * (step > 1)
    text += ", gradients " + ("have one factor" if step in other.rescaled else "before clipping are right")
    hint = ""
    if fits and np.ptp(fits) <= 2 * max(d.bound for d in of_state):
        factor = number_text(float(np.median(fits)), 4)
        hint = f"{of_state[0].key[1]} is {factor} times the first recording's"
    details = (("place", what), ("step", step), ("parameters", tuple(names)))
    return Cause("not explained", text, hint=hint, details=details)


def _decayed(one: Numbers, other: Numbers, wrong: Sequence[TensorDistance]) -> Cause | None:
    """An update or an average of gradients is wrong by a multiple of the weights."""
    kind = wrong[0].key[1] if wrong else ""
    wanted = [((d.key[0] - 1, WEIGHTS, d.key[2]), d) for d in wrong if d.key[1] == kind]
    if not wanted or any(before not in of.whole for before, _ in wanted for of in (one, other)):
        return None

    def sums(of: Numbers, before: Key, d: TensorDistance) -> np.ndarray:
        step, _, fqn = d.key
        added = kind == OF_UPDATES
        return of.whole[step, WEIGHTS, fqn].sums - of.whole[before].sums if added else of.whole[d.key].sums

    found = [(sums(one, *at), sums(other, *at), one.whole[at[0]].sums, at[1].bound) for at in wanted]
    off, held = (
        np.concatenate(of) for of in zip(*((theirs - mine, held) for mine, theirs, held, _ in found), strict=True)
    )
    times = float(off @ held / (held @ held or 1.0))
    if abs(times) > MOST_DECAY or not all(
        apart(mine + times * held, theirs)[0] <= bound for mine, theirs, held, bound in found
    ):
        return None
    much = f"{number_text(times, 4)} times the weights in addition"
    if kind == OF_UPDATES:
        return Cause(
            "weight decay", f"weights decay otherwise: what the step adds has {much}", details=(("times", times),)
        )
    text = f"weight decay is added to gradients: {kind} has {much}"
    return Cause("weight decay in the gradients", text, details=(("times", times),))


def _clipped(one: Numbers, other: Numbers, wrong: Sequence[TensorDistance]) -> Cause | None:
    """In step 1 averages are other multiples of gradients, which are the same."""
    if other.rescaled.get(1) and not one.norms.get(1):
        return None  # the first recording's gradients are seen after clipping, so its factor is not known
    averages = [d for d in wrong if d.key[0] == 1 and d.key[1] in AVERAGES]
    found: dict[str, tuple[float, float]] = {}
    for d in averages:
        multiples = [_multiple(of, d) for of in (one, other)]
        if None in multiples:
            return None
        found[d.key[2]] = multiples[0], multiples[1]  # type: ignore[assignment]
    return _multiplied_otherwise(one, found, max(d.bound for d in averages)) if found else None


def _multiple(of: Numbers, average: TensorDistance) -> float | None:
    """Return what a gradient was multiplied by before it came into its average; None where that is not known."""
    _, kind, fqn = average.key
    taken, gradient = _taken(of, kind), of.whole.get((1, GRADIENT, fqn))
    if taken is None or gradient is None:
        return None
    multiple = apart(gradient.sums, of.whole[average.key].sums)[1]
    is_so = apart(multiple * gradient.sums, of.whole[average.key].sums)[0] <= average.bound
    return multiple / taken if is_so else None


def _taken(of: Numbers, kind: str) -> float | None:
    """Return how much of a gradient is in an average at first; None where the optimizer's settings do not say."""
    if len(of.optimizers) != 1:
        return None
    if kind == "momentum_buffer":
        return 1.0 if of.optimizers[0].startswith("SGD(") else None
    beta = BETA1.search(of.optimizers[0])
    return 1 - float(beta[1]) if beta else None


def _multiplied_otherwise(one: Numbers, found: dict[str, tuple[float, float]], bound: float) -> Cause:
    """found: parameter -> what gradients are multiplied by in either recording, after they were seen."""
    factors = [theirs for _, theirs in found.values()]
    right, seen = next(iter(found.values()))
    digits = next(n for n in (4, 8, 17) if n > 8 or number_text(right, n) != number_text(seen, n))
    details, where = (("expected", right), ("factors", tuple(factors))), in_words([*found], one)
    kind, how = "clipped by another norm", f"multiplied by {number_text(seen, digits)}"
    if max(factors) - min(factors) > 2 * bound * max(factors):
        how = f"multiplied by {number_text(min(factors), 4)} to {number_text(max(factors), 4)}"
    elif math.isclose(seen, 1, rel_tol=min(bound, 0.01)) and right < 1:
        kind, how = "clipping left out", "as they are"
    elif seen > 1:
        kind = "clipping enlarges gradients"
    text = f"gradients reach the optimizer {how}, the first recording's multiplied by {number_text(right, digits)}"
    return Cause(kind, text, where, details=details)
