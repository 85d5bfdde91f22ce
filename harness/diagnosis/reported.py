"""A number that ranks report is one on record: whose? Gradients may be clipped by the same norms.

Reports are compared with what the ranks themselves did (losses, gradients, rates). So a wrong report is found also where the
training is wrong, and one that only repeats what is wrong is not blamed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import numpy as np

from harness.checks.reported_rate import CLOSE
from harness.checks.update import observed_norm
from harness.diagnosis.factors import factor_text, token_factors
from harness.diagnosis.hypothesis import Broken, Fact, Hypothesis, seen
from harness.diagnosis.words import finding_line, on_ranks
from harness.evidence.text import number_text
from harness.judge.losses import losses
from harness.judge.reporting import Read, silences
from harness.judge.result import Cause
from harness.judge.tolerance import clip_coefficient
from harness.judge.trial import Trial
from harness.plan.grid import coordinate, groups
from harness.plan.slices import tp_dim
from harness.plan.stages import parameters_of_stage
from harness.spec.dims import AXES

Number = Callable[[int, int], float | None]
"""What would be reported by a rank in a step; None where nothing is known."""
Details = tuple[tuple[str, object], ...]
Source = tuple[Details, Number]
Ranks = Mapping[int, Sequence[int]]
"""By rank, those whose parts its number is made of."""

SHOWN = {"reported_loss": "loss", "grad_norm": "gradient norm", "reported_rate": "learning rate"}
FIELDS = {"reported_loss": "reported_loss", "grad_norm": "grad_norm", "reported_rate": "reported_lr"}
READ: dict[str, Read] = {check: attrgetter(name) for check, name in FIELDS.items()}
WRONG = {"loss", "gradients", "update"}  # checks that what is reported may follow from
EXACT = 1e-8  # a number is another one's, not only close to it
SHARES = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)  # of a running mean, what is kept
WORDS = {
    "axes": "not reduced over {}",
    "rank": "of rank {} alone",
    "microbatch": "of microbatch {} alone",
    "over": "over the tokens of {}",
    "mean over": "as a mean of the means of {}",
    "replicas": "with every replica along {} counted",
    "only": "of {} only",
    "without": "without {}",
    "type": "of norm type {}",
    "added over": "added up over {}",
    "power": "to the power of {}",
    "clipped to": "after clipping to {}",
    "before": "of {} step before",
    "after": "of {} step after",
    "step": "of step {}",
    "sum": "added up over {}",
    "mean": "as the mean of {}",
    "kept": "as a running mean with decay {}",
    "total": "as the token losses of all steps so far over the tokens of this one, those before counted {} times",
    "of": "which is none but the {}",
    "constant": "as {} always",
    "rounded to": "rounded to {}",
    "factor": "times {}",
    "first": "in the first step {}",
    "reported": "that ranks report",
}
"""What a number is, in words that follow its name."""


@dataclass(frozen=True)
class Reported:
    """What ranks report of one kind, by (rank, step), and what was seen of it. odd: where these differ."""

    check: str
    shown: dict[tuple[int, int], float]
    right: dict[tuple[int, int], float]
    odd: tuple[tuple[int, int], ...]

    def is_all(self, number: Number) -> bool:
        """Whether that number is what is odd, wherever there is one."""
        known = [(self.shown[at], other) for at in self.odd if (other := number(*at)) is not None]
        return bool(known) and all(math.isclose(shown, other, rel_tol=EXACT) for shown, other in known)

    @property
    def about_right(self) -> bool:
        return all(number_text(self.shown[at] / (self.right[at] or math.nan)) == "1" for at in self.odd)


def wrong_reports(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    for check, what in SHOWN.items():
        if check not in broken or silences(trial, "", READ[check]) or not (reported := reported_of(trial, check)):
            continue
        steps, known = {step for _, step in reported.odd}, {step for _, step in reported.shown}
        when = f" in step {', '.join(map(str, sorted(steps)))}" * (steps != known)
        where = (on_ranks(trial, {rank for rank, _ in reported.odd}) + when).strip()
        for details, number, hint in _whose(trial, reported):
            text = f"the reported {what} is {phrase(what, details)}"
            cause = Cause("wrong report", text, where, hint=hint, details=(("report", what), *details))
            assume = partial(assuming_reports, reported=reported, number=number)
            yield Hypothesis(cause, assume, lines=(finding_line(broken[check]),))


def odd_reports(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """What is silent, and what is no other number of the run; where training is wrong too, that may follow from its numbers."""
    for check, what in SHOWN.items():
        if check not in broken:
            continue
        if silences(trial, "", READ[check]):
            yield seen(broken, check, "report lacking", f"the reported {what} is lacking in some steps")
            continue
        reported = reported_of(trial, check)
        if reported is None and any(one.quantity == "reported largest loss" for one in broken[check].findings):
            yield seen(broken, check, "wrong report", "the reported largest loss is wrong")
        if reported and (not WRONG & {*broken} or reported.about_right):
            yield replace(seen(broken, check, "wrong report", f"the reported {what} is wrong"), symptom=True)


def phrase(what: str, details: Details) -> str:
    """Say what a number is: the gradient norm not reduced over dp_shard and tp."""
    texts = {name: " and ".join(v) if isinstance(v, tuple) else v for name, v in details}
    texts |= {name: number_text(v) for name, v in texts.items() if isinstance(v, float)}
    return f"the {what} " + ", ".join(WORDS[name].format(value) for name, value in texts.items())


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
        number, known = READ[check](step), on_record(trial, check, rank, step.step)
        if number is not None and known is not None and math.isfinite(known):
            shown[rank, step.step], right[rank, step.step] = number, known
    bounds = {"reported_loss": trial.bounds.loss, "grad_norm": trial.bounds.grad_norm}.get(check, {})
    odd = [at for at in shown if not abs(shown[at] - right[at]) <= bounds.get(at[1], CLOSE) * abs(right[at])]
    return Reported(check, shown, right, tuple(odd)) if odd else None


def on_record(trial: Trial, check: str, rank: int, step: int) -> float | None:
    """The loss, norm or rate that a step had. None where there is no such step; a rate's may be the schedule's."""
    record = next((record for record in trial.ranks[rank].steps if record.step == step), None)
    if check == "reported_rate":
        planned = (one.lr for one in trial.reference.steps if one.step == step)
        return record.lr if record else next(planned, None)
    if check == "reported_loss":
        return loss_of(trial, rank, step, [*trial.ranks]) if record else None
    if record is None or not any(one.gradients for _, one in trial.own_steps() if one.step == step):
        return None
    place = coordinate(trial.case.dims, rank)["dp_replicate"]
    replica = [one for one in sorted(trial.ranks) if coordinate(trial.case.dims, one)["dp_replicate"] == place]
    return observed_norm(trial, step, (rank, *replica, *sorted(trial.ranks)))  # its own numbers first


# ---- the table of sources


def _whose(trial: Trial, reported: Reported) -> Iterator[tuple[Details, Number, str]]:
    """The first source that gives all, or multiples by a number of the case; and in words which number that may be."""
    for details, number in _sources(trial, reported.check):
        if reported.is_all(number):
            yield details, number, ""
            return
    at = reported.odd[0]
    ratio = reported.shown[at] / (reported.right[at] or math.nan)
    known = [*token_factors(trial, at[1], ratio)]
    if len(reported.odd) > 1 and number_text(ratio) != "1":
        known.append((factor_text(trial, ratio), lambda step: ratio))
    for hint, by_step in known:
        multiple: Number = lambda rank, step, by=by_step: by(step) * reported.right[rank, step]  # type: ignore[misc]  # noqa: E731
        if reported.is_all(multiple):
            yield (("factor", ratio),), multiple, hint.removeprefix(": ")


def _sources(trial: Trial, check: str) -> Iterator[Source]:
    """Parts of this number, that of other steps, other numbers, and this one rounded."""
    right, limit = partial(on_record, trial, check), trial.case.training.max_norm

    def made(by: Callable[[float], float]) -> Number:
        return lambda rank, step: None if (known := right(rank, step)) is None else by(known)

    if check == "reported_loss":
        yield from _losses(trial)
    if check == "grad_norm":
        yield from norms(trial)
        yield (("power", 2),), made(lambda norm: norm**2)
        if limit is not None:
            yield (("clipped to", limit),), made(lambda norm: norm * clip_coefficient(norm, limit))
            yield (("clipped to", limit),), made(lambda norm: min(norm, limit))
    yield from of_other_steps(trial, right)
    for other in SHOWN.keys() - {check}:
        yield (("of", SHOWN[other]),), partial(on_record, trial, other)
    for value in (0.0, trial.case.training.lr):
        yield (("constant", value),), made(lambda _, value=value: value)  # type: ignore[misc]
    yield (("rounded to", "float32"),), made(lambda number: float(np.float32(number)))


def of_other_steps(trial: Trial, right: Number) -> Iterator[Source]:
    """The same of another step, and what is kept of all steps so far."""
    steps = trial.case.steps
    for by in range(1, len(steps)):
        for name, ahead in (("before", -by), ("after", by)):
            yield ((name, by),), lambda rank, step, ahead=ahead: right(rank, step + ahead)  # type: ignore[misc]
    for one in steps:
        yield (("step", one),), lambda rank, step, one=one: right(rank, one)  # type: ignore[misc]
    every = "all steps so far"
    yield (("sum", every),), partial(_so_far, trial, right, lambda n: (1, 1), False)
    yield (("mean", every),), partial(_so_far, trial, right, lambda n: (n / (n + 1), 1 / (n + 1)), False)
    for by in SHARES:
        kept = lambda n, by=by: (by, 1 - by) if n else (0, 1)  # type: ignore[misc]  # noqa: E731
        yield (("kept", by),), partial(_so_far, trial, right, kept, False)
    for by in range(1, len(trial.ranks) + 1):
        yield (("total", by),), partial(_so_far, trial, right, lambda n, by=by: (by, 1), True)  # type: ignore[misc]


def _so_far(
    trial: Trial, right: Number, shares: Callable[[int], tuple[float, float]], tokens: bool, rank: int, step: int
) -> float | None:
    """shares: of the n-th step, how often the total before and its own number count; tokens: as sums over them."""
    total, weight = 0.0, 1
    for n, number in enumerate(range(trial.first_step, step + 1)):
        weight = trial.reference_step(number).valid_tokens if tokens else 1
        if (known := right(rank, number)) is None:
            return None
        total = shares(n)[0] * total + shares(n)[1] * weight * known
    return total / weight


def sets_of_ranks(trial: Trial) -> Iterator[tuple[Details, Ranks]]:
    """By the axes that a sum is not reduced over, few first; then one rank alone, for all."""
    present = [axis for axis in AXES if getattr(trial.case.dims, axis) > 1]
    for count in range(1, len(present) + 1):
        for missing in itertools.combinations(present, count):
            along = [axis for axis in present if axis not in missing]
            those = groups(trial.case.dims, *along) if along else [(rank,) for rank in trial.ranks]
            yield (("axes", missing),), {rank: group for group in those for rank in group}
    for one in sorted(trial.ranks):
        yield (("rank", one),), dict.fromkeys(trial.ranks, (one,))


def _losses(trial: Trial) -> Iterator[Source]:
    """Of some ranks, of all microbatches or one, over their own tokens or all, times or over the number of microbatches."""
    passes = trial.case.passes
    numbers = (None, *range(1, passes + 1)) if passes > 1 else (None,)
    chosen = (((), dict.fromkeys(trial.ranks, [*trial.ranks])), *sets_of_ranks(trial))
    for (details, ranks), number, whole in itertools.product(chosen, numbers, (False, True)):
        of = (*details, *((("microbatch", number),) if number else ()), *((("over", "the step"),) if whole else ()))
        for factor in (1.0, passes, 1 / passes):
            part = partial(_part_of_loss, trial, ranks, number, whole, factor)
            yield (*of, *((("factor", factor),) if factor != 1 else ())), part
    for name in ("ranks", "microbatches"):
        yield (("mean over", name),), partial(_mean_of_means, trial, name == "microbatches")


def _part_of_loss(
    trial: Trial, ranks: Ranks, number: int | None, whole: bool, factor: float, rank: int, step: int
) -> float | None:
    known = loss_of(trial, rank, step, ranks[rank], number, trial.reference_step(step).valid_tokens if whole else 0)
    return None if known is None else factor * known


def loss_of(
    trial: Trial, rank: int, step: int, ranks: Sequence[int], number: int | None = None, tokens: int = 0
) -> float | None:
    """Of tp peers, who compute the same, those at the place of the rank. number: of one microbatch. tokens: to divide by."""
    chosen = slice(None) if number is None else slice(number - 1, number)
    parts = [one for of in _of_ranks(trial, rank, step, ranks) for one in of[chosen]]
    count = tokens or sum(count for _, count in parts)
    return math.fsum(total for total, _ in parts) / count if parts and count else None


def _of_ranks(trial: Trial, rank: int, step: int, ranks: Sequence[int]) -> list[list[tuple[float, int]]]:
    places = {one: coordinate(trial.case.dims, one)["tp"] for one in trial.ranks}
    return [losses(trial, one, step) for one in ranks if places.get(one) == places[rank]]


def _mean_of_means(trial: Trial, split: bool, rank: int, step: int) -> float | None:
    of_ranks = [of for of in _of_ranks(trial, rank, step, [*trial.ranks]) if of]
    parts = [[one] for of in of_ranks for one in of] if split else of_ranks
    means = [math.fsum(total for total, _ in of) / count for of in parts if (count := sum(count for _, count in of))]
    return math.fsum(means) / len(means) if means else None


def norms(trial: Trial) -> Iterator[Source]:
    """Of the gradients of some ranks or parameters, counted or put together otherwise."""
    for details, ranks in sets_of_ranks(trial):
        yield details, partial(norm_of, trial, ranks=ranks)
    for axis in AXES:
        yield (("replicas", axis),), partial(norm_of, trial, again=axis)
    shapes, every = trial.case.model.parameter_shapes(), {*trial.plan.shapes}
    vectors = {fqn for fqn in every if len(shapes.get(fqn, ())) == 1}
    ends = {fqn for fqn in every if not fqn.startswith("layers.")} - vectors
    for name, some in (("norm weights", vectors), ("embedding and output", ends)):
        yield (("only", name),), partial(norm_of, trial, fqns=some)
        yield (("without", name),), partial(norm_of, trial, fqns=every - some)
    for power in (1.0, math.inf):
        yield (("type", power),), partial(norm_of, trial, power=power)
    for name, parts in groupings(trial).items():
        yield (("added over", name),), partial(_sum_of_norms, trial, parts)


def groupings(trial: Trial) -> dict[str, list[set[str]]]:
    """Parameters that may have a norm of their own."""
    shapes = trial.case.model.parameter_shapes()
    keys: dict[str, Callable[[str], str]] = {
        "parameters": lambda fqn: fqn,
        "layers": lambda fqn: ".".join(fqn.split(".")[:2]),
        "kinds of parameters": lambda fqn: str(len(shapes.get(fqn, ()))),
        "placements over tp": lambda fqn: str(tp_dim(fqn)),
    }
    found = {"stages": [{*parameters_of_stage(trial.case, stage)} for stage in range(trial.case.n_stages)]}
    for name, key in keys.items():
        alike = itertools.groupby(sorted(trial.plan.shapes, key=key), key=key)
        found[name] = [{*fqns} for _, fqns in alike]
    return found


def _sum_of_norms(trial: Trial, parts: Sequence[set[str]], rank: int, step: int) -> float:
    return math.fsum(norm_of(trial, rank, step, fqns=fqns) for fqns in parts)


def norm_of(
    trial: Trial,
    rank: int,
    step: int,
    *,
    ranks: Ranks | None = None,
    fqns: Collection[str] | None = None,
    again: str = "",
    power: float = 2.0,
) -> float:
    """Each entry counted once, as the first rank has it; again: once for each place along that axis."""
    found: dict[object, float] = {}
    for one in ranks[rank] if ranks else sorted(trial.ranks):
        place = coordinate(trial.case.dims, one).get(again)
        for record in (record for record in trial.ranks[one].steps if record.step == step):
            for fqn, gradient in record.gradients.items():
                key = fqn, trial.gradient_slice_of(one, fqn), place
                if key not in found and (fqns is None or fqn in fqns):
                    found[key] = record.squares[fqn] if power == 2 else float(np.linalg.norm(gradient.ravel(), power))
    total = max(found.values(), default=0.0) if power == math.inf else math.fsum(found.values())
    return math.sqrt(total) if power == 2 else total
