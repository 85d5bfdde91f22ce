"""What ranks report of a step is not what was seen of it: whose number it is instead.

All is compared with what the ranks themselves did (losses, gradients, rates), so that a wrong report is told also where the
training is wrong, and one that only repeats what is wrong is not blamed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from harness.checks.reported_rate import CLOSE
from harness.checks.update import observed_norm
from harness.diagnosis.factors import factor_text, times_text, token_factors
from harness.diagnosis.hypothesis import Broken, Fact, Hypothesis, stated, verdict_of
from harness.diagnosis.norms import AXES, axes_left_out, other_norms, peers
from harness.diagnosis.words import finding_line, rank_words
from harness.judge.losses import losses
from harness.judge.reporting import Read, below, due, silences
from harness.judge.result import Cause, Verdict
from harness.judge.tolerance import clip_coefficient
from harness.judge.trial import Trial
from harness.plan.grid import coordinate

Number = Callable[[int, int], float | None]
"""What would be reported by a rank in a step; None where nothing is known."""

SHOWN = {"reported_loss": "loss", "grad_norm": "gradient norm", "reported_rate": "learning rate"}
READ: dict[str, Read] = {
    "reported_loss": lambda step: step.reported_loss,
    "grad_norm": lambda step: step.grad_norm,
    "reported_rate": lambda step: step.reported_lr,
}
WRONG = {"loss", "gradients", "update"}  # checks that what is reported may follow from
AXES_OF_SAMPLES = ("dp_replicate", "dp_shard", "cp")
EXACT = 1e-8  # a number is another one's, not only close to it


@dataclass(frozen=True)
class Reported:
    """What ranks report of one kind, by (rank, step), and what was seen of it. odd: where these differ."""

    check: str
    shown: dict[tuple[int, int], float]
    right: dict[tuple[int, int], float]
    odd: tuple[tuple[int, int], ...]
    world: int

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for rank, _ in self.odd})

    @property
    def who(self) -> str:
        if len(self.ranks) == self.world:
            return "each rank reports"
        return f"{rank_words(self.ranks)} report{'s' * (len(self.ranks) == 1)}"

    @property
    def ratios(self) -> list[float]:
        return [self.shown[at] / self.right[at] for at in self.odd if self.right[at]]

    @property
    def about_right(self) -> bool:
        return bool(self.ratios) and all(times_text(ratio) == times_text(1.0) for ratio in self.ratios)

    def is_all(self, number: Number) -> bool:
        """Whether that number is what is odd, wherever there is one."""
        known = [(self.shown[at], other) for at in self.odd if (other := number(*at)) is not None]
        return bool(known) and all(_near(shown, other) for shown, other in known)

    def when(self, number: Number) -> str:
        """The odd steps, where the odd ranks would report it in other steps and do not."""
        others = [at for at in self.shown if at[0] in self.ranks and at not in self.odd]
        instead = [(self.right[at], number(*at)) for at in others]
        if all(other is None or _near(right, other) for right, other in instead):
            return ""
        return f" in {_steps(sorted({step for _, step in self.odd}))}"


def wrong_reports(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    for check in SHOWN:
        if check not in broken or silences(trial, "", READ[check]) or not (reported := reported_of(trial, check)):
            continue
        for text, number in _instead(trial, reported):
            clause = text if text.startswith("it is") else f"{reported.who} {text}"
            cause = Cause("wrong report", f"{_what(trial, SHOWN[check], broken)}: {clause}{reported.when(number)}")
            assume = partial(assuming_reports, reported=reported, number=number)
            yield Hypothesis(cause, assume, lines=(finding_line(broken[check]),))


def odd_reports(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """What is silent, and what is no other number of the run; where training is wrong too, that may follow from its numbers."""
    for check, what in SHOWN.items():
        if check not in broken:
            continue
        if silences(trial, "", READ[check]):
            yield stated(broken, check, "report lacking", _silent(trial, what, READ[check]))
        elif check == "reported_loss" and (text := _below(trial)):
            yield stated(broken, check, "wrong report", f"{_what(trial, 'largest loss', broken)}: {text}")
        elif (reported := reported_of(trial, check)) and (not WRONG & set(broken) or reported.about_right):
            text = f"{_what(trial, SHOWN[check], broken)}: {reported.who} {_another_number(reported)}"
            yield replace(stated(broken, check, "wrong report", text), symptom=True)


def _what(trial: Trial, what: str, broken: Broken) -> str:
    alone = trial.as_requested and not WRONG & set(broken)
    alone = alone and verdict_of(trial, "gradients") is Verdict.PASS
    return f"the reported {what} is wrong{', the training itself is right' * alone}"


def assuming_reports(trial: Trial, reported: Reported, number: Number) -> Trial:
    def instead(rank: int, step: int) -> float:
        if (rank, step) not in reported.odd:
            return reported.right[rank, step]
        known = number(rank, step)
        return reported.shown[rank, step] if known is None else known

    return trial.assuming(reports={reported.check: instead})


def reported_of(trial: Trial, check: str) -> Reported | None:
    """None where the reports are what was seen, or where that is not known."""
    shown, right = {}, {}
    for rank, step, _ in trial.steps():
        number, seen = READ[check](step), _seen(trial, check, rank, step.step)
        if number is not None and seen is not None and math.isfinite(seen):
            shown[rank, step.step], right[rank, step.step] = number, seen
    odd = tuple(at for at in shown if not abs(shown[at] - right[at]) <= _bound(trial, check, at[1]) * abs(right[at]))
    return Reported(check, shown, right, odd, len(trial.ranks)) if odd else None


def _seen(trial: Trial, check: str, rank: int, step: int) -> float | None:
    """The loss, norm or rate that a step had. None where there is no such step; a rate's may be the schedule's."""
    record = next((record for record in trial.ranks[rank].steps if record.step == step), None)
    if check == "reported_rate":
        planned = (one.lr for one in trial.reference.steps if one.step == step)
        return record.lr if record else next(planned, None)
    if record is None or (check == "grad_norm" and not _has_gradients(trial, step)):
        return None
    if check == "reported_loss":
        return _loss_of(trial, tuple(trial.ranks), rank, step)
    return observed_norm(trial, step, (rank, *_replica(trial, rank), *sorted(trial.ranks)))  # its own numbers first


def _has_gradients(trial: Trial, step: int) -> bool:
    return any(record.gradients for _, record in trial.own_steps() if record.step == step)


def _replica(trial: Trial, rank: int) -> list[int]:
    place = coordinate(trial.case.dims, rank)["dp_replicate"]
    return [other for other in sorted(trial.ranks) if coordinate(trial.case.dims, other)["dp_replicate"] == place]


def _bound(trial: Trial, check: str, step: int) -> float:
    bounds = {"reported_loss": trial.bounds.loss, "grad_norm": trial.bounds.grad_norm}
    return bounds[check][step] if check in bounds else CLOSE


# ---- what is reported instead


def _instead(trial: Trial, reported: Reported) -> Iterator[tuple[str, Number]]:
    for text, number in (*OTHERS[reported.check](trial), *_of_other_steps(trial, reported.check)):
        if reported.is_all(number):
            yield text, number
            return
    if reported.is_all(rounded := lambda rank, step: float(np.float32(reported.right[rank, step]))):
        yield "the right one rounded to float32", rounded
    ratio = reported.shown[reported.odd[0]] / (reported.right[reported.odd[0]] or math.nan)
    known = [*token_factors(trial, reported.odd[0][1], ratio)]
    if len(reported.odd) > 1 and times_text(ratio) != times_text(1.0):
        known.append((factor_text(trial, ratio), lambda step: ratio))
    for hint, by_step in known:
        multiple: Number = lambda rank, step, by=by_step: by(step) * reported.right[rank, step]  # type: ignore[misc]  # noqa: E731
        if reported.is_all(multiple):
            yield f"{times_text(ratio)} the right one{hint}", multiple


def _other_losses(trial: Trial) -> Iterator[tuple[str, Number]]:
    if trial.case.dims.pp > 1:
        text, last = "0: the loss of the last stage is not passed on over pp", trial.last_stages()
        yield text, lambda rank, step: None if rank in last else 0.0
    if len(trial.ranks) > 1 and trial.case.dims.cp == 1:
        yield "the loss of its own samples", partial(_loss_over, trial, (), False)
    for missing, along in axes_left_out(trial, AXES_OF_SAMPLES):
        if along or "cp" in missing:
            text = f"it is not reduced over {' and '.join(missing)}"
            for everyone in (False, True):
                yield text, partial(_loss_over, trial, along, everyone)
    means = "the mean of {} means, each of which counts alike whatever its number of valid tokens"
    yield means.format("the ranks' own"), partial(_mean_of_means, trial, False)
    if (passes := trial.case.passes) > 1:
        yield means.format("the microbatches'"), partial(_mean_of_means, trial, True)
        count, all_tokens = f"the number of microbatches ({passes})", ", divided by all valid tokens of the step"
        parts = (("", False, 1.0), (f", divided by {count}", False, 1 / passes))
        sums = ((all_tokens, True, 1.0), (f"{all_tokens}, times {count}", True, passes))
        whose: tuple[tuple[str, tuple[str, ...]], ...] = (("the", AXES), ("its own", ()))
        for (of, along), (how, everyone, factor) in itertools.product(whose, (*parts, *sums)):
            yield f"that of {of} last microbatch alone{how}", partial(_of_the_last, trial, along, everyone, factor)


def _other_norms(trial: Trial) -> Iterator[tuple[str, Number]]:
    limit = trial.case.training.max_norm

    norms = {step: observed_norm(trial, step) for step in trial.case.steps}
    clipped = {step: norm * clip_coefficient(norm, limit) for step, norm in norms.items()}
    if limit is not None and clipped != norms:
        text = f"the norm after clipping ({clipped[trial.first_step]:.6g}), requested before clipping"
        yield text, lambda rank, step: clipped[step]
        yield text, lambda rank, step: min(norms[step], limit)
    for whose, norm in other_norms(trial):
        yield whose.replace("a norm not", "it is not"), norm


def _other_rates(trial: Trial) -> Iterator[tuple[str, Number]]:
    peak = trial.case.training.lr
    yield f"the peak ({peak:.6g}), as without a schedule", lambda rank, step: peak


OTHERS = {"reported_loss": _other_losses, "grad_norm": _other_norms, "reported_rate": _other_rates}


def _of_other_steps(trial: Trial, check: str) -> Iterator[tuple[str, Number]]:
    for text, ahead in (("that of the step before", -1), ("that of the next step", 1)):
        yield text, partial(_ahead, trial, check, ahead)
    if check != "reported_rate":
        yield "the mean of all steps so far", partial(_running, trial, check, 0.0)
        yield "the sum of all steps so far", partial(_running_sum, trial, check)
    if check == "reported_loss":
        for again in sorted({1, *(len(groups[0]) for groups in trial.plan.groups.values()), len(trial.ranks)}):
            counted = f", the earlier total counted {again} times in each step" if again > 1 else ""
            text = f"the token losses of all steps so far, divided by the tokens of this step{counted}"
            yield text, partial(_running_total, trial, again)
        for kept in (0.5, 0.8, 0.9, 0.95, 0.98, 0.99):
            yield f"a running mean with decay {kept:g}", partial(_running, trial, check, kept)


def _ahead(trial: Trial, check: str, by: int, rank: int, step: int) -> float | None:
    return _seen(trial, check, rank, step + by)


def _running(trial: Trial, check: str, kept: float, rank: int, step: int) -> float | None:
    """Of this launch's steps; 0 kept: all count alike."""
    seen = [_seen(trial, check, rank, number) for number in range(trial.first_step, step + 1)]
    known = [one for one in seen if one is not None]
    if len(known) < len(seen):
        return None
    shares = [1 / (number + 1) for number in range(len(known))] if not kept else [1.0, *[1 - kept] * (len(known) - 1)]
    return functools.reduce(lambda mean, of: mean + of[1] * (of[0] - mean), zip(known, shares, strict=True), 0.0)


def _running_sum(trial: Trial, check: str, rank: int, step: int) -> float | None:
    mean = _running(trial, check, 0.0, rank, step)
    return None if mean is None else mean * (step - trial.first_step + 1)


def _running_total(trial: Trial, again: int, rank: int, step: int) -> float | None:
    """Of a sum that is never set back. again: how many ranks bring it along, once it has been reduced over them."""
    total = 0.0
    for number in range(trial.first_step, step + 1):
        mean = _seen(trial, "reported_loss", rank, number)
        if mean is None:
            return None
        total = again * total + mean * trial.reference_step(number).valid_tokens
    return total / trial.reference_step(step).valid_tokens


def _of_the_last(
    trial: Trial, along: tuple[str, ...], everyone: bool, factor: float, rank: int, step: int
) -> float | None:
    """The loss of the last microbatches of the rank and its peers, times a factor."""
    known = _loss_over(trial, along, everyone, rank, step, last=True)
    return None if known is None else factor * known


def _mean_of_means(trial: Trial, of_microbatches: bool, rank: int, step: int) -> float | None:
    """Over all ranks at the tp place of this one; of each all microbatches together, or one by one."""
    seen = [losses(trial, other, step) for other in peers(trial, rank, AXES_OF_SAMPLES)]
    of_ranks = ([loss] for one in seen for loss in one) if of_microbatches else filter(None, seen)
    sums = [(math.fsum(total for total, _ in of), sum(count for _, count in of)) for of in of_ranks]
    means = [total / count for total, count in sums if count]
    return math.fsum(means) / len(means) if means else None


def _loss_over(
    trial: Trial, along: tuple[str, ...], everyone: bool, rank: int, step: int, last: bool = False
) -> float | None:
    """Over the tokens of the rank and its peers, or divided by those of all. last: of each rank's last microbatch."""
    tokens = trial.reference_step(step).valid_tokens if everyone else 0
    return _loss_of(trial, peers(trial, rank, along), rank, step, tokens, last)


def _loss_of(
    trial: Trial, ranks: tuple[int, ...], rank: int, step: int, tokens: int = 0, last: bool = False
) -> float | None:
    """Of tp peers, who compute the same, those at the place of the rank."""
    place = coordinate(trial.case.dims, rank)["tp"]
    alike = [other for other in ranks if other in trial.ranks and coordinate(trial.case.dims, other)["tp"] == place]
    seen = [loss for other in alike for loss in losses(trial, other, step)[-1 if last else 0 :]]
    if not seen:  # a stage that computes none
        return None
    count = tokens or sum(number for _, number in seen)
    return math.fsum(total for total, _ in seen) / count if count else None


# ---- what is told without being another number


def _another_number(reported: Reported) -> str:
    at = reported.odd[0]
    if len(reported.odd) == 1:
        return f"{reported.shown[at]:.6g} once, expected {reported.right[at]:.6g}"
    if reported.about_right:
        return f"a number off by up to {max(abs(ratio - 1) for ratio in reported.ratios):.1e}"
    seen = f"{reported.shown[at]:.6g} on rank {at[0]} in step {at[1]}, expected {reported.right[at]:.6g}"
    return f"a number that no hypothesis explains ({seen})"


def _below(trial: Trial) -> str:
    """Of a largest loss that is below the mean shown beside it; empty where none is, or where the mean is wrong too."""
    shown = {(rank, step.step): step for rank, step, _ in trial.steps() if step.reported_loss is not None}
    wrong = [at for at, step in shown.items() if below(step.reported_loss or 0.0, step.reported_largest) > CLOSE]
    if not wrong or reported_of(trial, "reported_loss"):
        return ""
    rank, others = wrong[0][0], len({rank for rank, _ in wrong}) - 1
    mean, largest = shown[wrong[0]].reported_loss, shown[wrong[0]].reported_largest
    more = f", and {others} more rank{'s' * (others > 1)} one below theirs" * bool(others)
    return f"rank {rank} reports {largest:.6g}, below the mean {mean:.6g}{more}"


def _silent(trial: Trial, what: str, read: Read) -> str:
    """Of the first rank that is silent: in which steps it reports, and in which not."""
    seen = {rank: [s.step for s in e.steps if read(s) is not None] for rank, e in sorted(trial.ranks.items())}
    lacking = {rank: [step for step in due(trial, rank) if step not in steps] for rank, steps in seen.items() if steps}
    rank = next(rank for rank in lacking if lacking[rank])
    return f"rank {rank} reports the {what} of {_steps(seen[rank])}, but not of {_steps(lacking[rank])}"


def _steps(steps: list[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=EXACT)
