"""What a resumed job did not restore, where its recording differs from that of a job that was not interrupted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.core.evidence.text import number_text
from harness.core.judge.result import Cause
from harness.recording.judged.judge_sketched import Numbers
from harness.recording.judged.sketch_distances import EQUAL, TensorDistance, apart
from harness.recording.judged.sketched_gradients import in_words
from harness.recording.sketches import GRADIENT, WEIGHTS

AVERAGES = ("exp_avg", "momentum_buffer")
"""Keys of averages of gradients in an optimizer's state."""


def other_weights(one: Numbers, other: Numbers, names: Sequence[str]) -> Cause:
    """These parameters are not those after the step: whether they are those of another."""
    text, details = f"training does not go on from the weights after step {one.after}", (("parameters", tuple(names)),)
    steps = sorted({step for step, kind, _ in one.whole if kind == WEIGHTS and step != one.after})
    of = [step for step in steps if all(_are(one, other, step, fqn) for fqn in names)]
    where = in_words(list(names), one)
    if len(of) != 1:
        return Cause("parameters changed over the checkpoint", text, where, details=details)
    kind = "resumed elsewhere" if of[0] else "parameters not loaded"
    told = f"from those after step {of[0]}" if of[0] else "from those before training"
    return Cause(kind, f"{text}, but {told}", where, details=(("of_step", of[0]), *details))


def _are(one: Numbers, other: Numbers, step: int, fqn: str) -> bool:
    mine, theirs = one.whole.get((step, WEIGHTS, fqn)), other.whole.get((one.after, WEIGHTS, fqn))
    return mine is not None and theirs is not None and apart(mine.sums, theirs.sums)[0] <= EQUAL


def new_state(one: Numbers, other: Numbers, wrong: Sequence[TensorDistance]) -> Cause | None:
    """Averages that are multiples of the first step's gradient alone, while those of the first recording are not."""
    averages = [d for d in wrong if d.key[0] == one.after + 1 and d.key[1] in AVERAGES]
    if not one.after or not averages or not all(_is_new(other, d) and not _is_new(one, d) for d in averages):
        return None
    kinds = sorted({d.key[1] for d in averages})
    names = tuple(dict.fromkeys(d.key[2] for d in averages))
    text = f"the optimizer's state is not restored: {kinds[0]} is a multiple of the gradient of step {one.after + 1}"
    details = (("step", one.after + 1), ("state", tuple(kinds)), ("parameters", names))
    return Cause("optimizer state lost", text, in_words(list(names), one), details=details)


def _is_new(of: Numbers, average: TensorDistance) -> bool:
    step, _, fqn = average.key
    gradient = of.whole.get((step, GRADIENT, fqn))
    if gradient is None:
        return False
    multiple = apart(gradient.sums, of.whole[average.key].sums)[1]
    return math.isfinite(multiple) and apart(multiple * gradient.sums, of.whole[average.key].sums)[0] <= average.bound


def schedule_again(one: Numbers, other: Numbers) -> Cause | None:
    """From the first wrong rate on, each is the one that the first recording had as many steps after its beginning."""
    seen = [(step, rate) for step, rate in sorted(other.rates.items()) if step > one.after and step in one.rates]
    wrong = next((step for step, rate in seen if rate != one.rates[step]), None)
    if not one.after or wrong is None:
        return None
    if not all(rate == one.rates.get(step - one.after) for step, rate in seen if step >= wrong):
        return None
    text = (
        f"the schedule restarts after resuming: the learning rate of step {wrong} is that of step {wrong - one.after}"
    )
    text += f", {number_text(other.rates[wrong][0])} in place of {number_text(one.rates[wrong][0])}"
    return Cause("schedule starts anew", text, details=(("step", wrong), ("of_step", wrong - one.after)))
