"""Causes of wrong numbers in a resumed job: what it did not restore, by the recording of a job that was not interrupted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from harness.core.causes.hypothesis import Broken, Fact, Hypothesis
from harness.core.evidence.text import number_text
from harness.core.judge.result import Cause
from harness.recording.judged.judge_sketched import Key, Numbers
from harness.recording.judged.sketch_distances import EQUAL, TensorDistance, distance_and_fit
from harness.recording.judged.sketched_steps import AVERAGES, STATE
from harness.recording.judged.two_recordings import TwoRecordings
from harness.recording.sketches import GRADIENT, WEIGHTS

BETAS = re.compile(r"betas \(([0-9.]+), ([0-9.]+)\)")
MOMENTUM = re.compile(r"momentum ([0-9.]+)")


def state_lost(evidence: TwoRecordings, broken: Broken) -> Iterator[Hypothesis[TwoRecordings]]:
    """Yield one hypothesis: the optimizer's state was not restored, for its averages hold the first step's gradient
    alone.

    Nothing unless it is the first step after resuming, and averages of the first recording hold earlier gradients.
    Where the optimizer's settings are not known, nothing can be assumed: the hypothesis then only states what is seen.
    """
    step = evidence.baseline.after + 1
    averages = [distance for distance in evidence.wrong if distance.key[1] in AVERAGES]
    if STATE not in broken or not evidence.baseline.after or evidence.step != step or not averages:
        return
    for average in averages:
        if not _is_multiple_of_gradient(evidence.candidate, average) or _is_multiple_of_gradient(
            evidence.baseline, average
        ):
            return
    kinds = sorted({distance.key[1] for distance in averages})
    names = tuple(dict.fromkeys(distance.key[2] for distance in averages))
    text = f"the optimizer's state is not restored: {kinds[0]} is a multiple of the gradient of step {step}"
    details = (("step", step), ("state", tuple(kinds)), ("parameters", names))
    cause = Cause("optimizer state lost", text, evidence.parameters_text(names), details=details)
    sketches = _new_state(evidence)
    if sketches is None:
        yield Hypothesis(cause, None, seen_by=(STATE,))
        return
    yield Hypothesis(cause, lambda assumed: assumed.if_first_had(sketches), seen_by=(STATE,), renumbers_ranks=True)


def _new_state(evidence: TwoRecordings) -> dict[Key, np.ndarray] | None:
    """Return by key the first recording's state without what remains of the step that the second goes on from.

    None if the settings do not say how much remains of a wrong tensor.
    """
    sketches: dict[Key, np.ndarray] = {}
    for distance in evidence.distances:
        _, kind, fqn = distance.key
        remains = _part_that_remains(evidence.baseline, kind)
        earlier = evidence.baseline.whole.get((evidence.baseline.after, kind, fqn))
        if remains is not None and earlier is not None:
            sketches[distance.key] = evidence.expected_sketch(distance.key) - remains * earlier.sums
        elif distance.is_wrong:
            return None
    return sketches


def _part_that_remains(numbers: Numbers, kind: str) -> float | None:
    """Return the factor of an average that remains after a step, such as beta1 or momentum.

    None where settings do not say. None as well for other kinds of state, and for several optimizers.
    """
    if len(numbers.optimizers) != 1:
        return None
    if kind == "momentum_buffer":
        momentum = MOMENTUM.search(numbers.optimizers[0])
        return float(momentum[1]) if momentum else None
    betas = BETAS.search(numbers.optimizers[0])
    number = {"exp_avg": 1, "exp_avg_sq": 2}.get(kind)
    return float(betas[number]) if betas and number else None


def _is_multiple_of_gradient(numbers: Numbers, average: TensorDistance) -> bool:
    """Return whether an average is a multiple of its step's gradient, within its bound.

    False where that is not known.
    """
    step, _, fqn = average.key
    gradient = numbers.whole.get((step, GRADIENT, fqn))
    if gradient is None:
        return False
    sums = numbers.whole[average.key].sums
    multiple = distance_and_fit(gradient.sums, sums)[1]
    return math.isfinite(multiple) and distance_and_fit(multiple * gradient.sums, sums)[0] <= average.bound


def other_weights(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact: a resumed job does not go on from the weights of its step, and from which known step's it does.

    Nothing unless initial weights are what is first wrong.
    """
    after = evidence.baseline.after
    names = evidence.names
    if evidence.first.check != "initial_weights" or not after or not names:
        return
    text = f"training does not go on from the weights after step {after}"
    kind = "parameters changed over the checkpoint"
    details: tuple[tuple[str, object], ...] = (("parameters", tuple(names)),)
    known = sorted({step for step, kind_of, _ in evidence.baseline.whole if kind_of == WEIGHTS and step != after})
    steps = []
    for step in known:
        if all(_are_of_step(evidence, step, fqn) for fqn in names):
            steps.append(step)
    if len(steps) == 1:
        kind = "resumed elsewhere" if steps[0] else "parameters not loaded"
        text += f", but from those after step {steps[0]}" if steps[0] else ", but from those before training"
        details = (("of_step", steps[0]), *details)
    yield Fact(Cause(kind, text, evidence.parameters_text(names), details=details), ("initial_weights",))


def _are_of_step(evidence: TwoRecordings, step: int, fqn: str) -> bool:
    """Return whether a parameter that the job goes on from has the first recording's values after this step.

    False if not known.
    """
    expected = evidence.baseline.whole.get((step, WEIGHTS, fqn))
    observed = evidence.candidate.whole.get((evidence.baseline.after, WEIGHTS, fqn))
    return expected is not None and observed is not None and distance_and_fit(expected.sums, observed.sums)[0] <= EQUAL


def restarted_schedule(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact: from the first wrong learning rate on, rates are those of a schedule that restarts after
    resuming.

    Nothing unless all later rates are what the first recording had as many steps after its beginning.
    """
    expected = evidence.baseline.rates
    after = evidence.baseline.after
    if "recipe" not in broken or not after or broken["recipe"].findings[0].name != "learning rate":
        return
    seen = [
        (step, rate) for step, rate in sorted(evidence.candidate.rates.items()) if step > after and step in expected
    ]
    wrong = next((step for step, rate in seen if rate != expected[step]), None)
    if wrong is None or not all(rate == expected.get(step - after) for step, rate in seen if step >= wrong):
        return
    observed = evidence.candidate.rates[wrong][0]
    text = f"the schedule restarts after resuming: the learning rate of step {wrong} is that of step {wrong - after}"
    text += f", {number_text(observed)} in place of {number_text(expected[wrong][0])}"
    details = (("step", wrong), ("of_step", wrong - after))
    yield Fact(Cause("schedule starts anew", text, details=details), ("recipe",))
