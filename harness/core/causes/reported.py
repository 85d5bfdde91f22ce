"""A number that ranks report is one on record: whose? Gradients may be clipped by the same norms.

Reports are compared with what the ranks themselves did (losses, gradients, rates). So a wrong report is found also where the
training is wrong, and one that only repeats what is wrong is not blamed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any

import numpy as np

from harness.core.case.dims import AXES
from harness.core.causes.factors import factor_text, token_factors
from harness.core.causes.hypothesis import Broken, Fact, Hypothesis, seen
from harness.core.causes.words import finding_line, on_ranks
from harness.core.checks.reported_rate import CLOSE
from harness.core.evidence.numbers import SPLIT
from harness.core.evidence.text import number_text
from harness.core.judge import norms as observed
from harness.core.judge.contents import ROUNDED
from harness.core.judge.losses import losses
from harness.core.judge.norms import GRADIENTS
from harness.core.judge.reporting import Read, silences
from harness.core.judge.result import Cause
from harness.core.judge.tolerance import clip_coefficient
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate, groups, tied_axis
from harness.core.plan.slices import tp_dim
from harness.core.plan.stages import parameters_of_stage

Number = Callable[[int, int], float | None]
"""What a rank would report of a step; None where nothing is known."""
Source = tuple[tuple[tuple[str, object], ...], Number]
"""A number on record, and what it is: words and values."""
Ranks = Mapping[int, Sequence[int]]
"""Rank -> those whose parts its number is made of."""
Shares = Callable[[int], tuple[float, float]]
"""(n) -> how often the total before the n-th step and its own number count."""

SHOWN = {"reported_loss": "loss", "grad_norm": "gradient norm", "reported_rate": "learning rate"}
FIELDS = {"reported_loss": "reported_loss", "grad_norm": "grad_norm", "reported_rate": "reported_lr"}
READ: dict[str, Read] = {check: attrgetter(name) for check, name in FIELDS.items()}
WRONG = {"loss", "gradients", "update"}  # checks that what is reported may follow from
EXACT = 1e-8  # a number is another one's, not only close to it
KEPT = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)  # of a running mean


@dataclass(frozen=True)
class Reported:
    """What ranks report of one kind, by (rank, step), and what was seen of it."""

    check: str
    shown: dict[tuple[int, int], float]
    right: dict[tuple[int, int], float]
    odd: tuple[tuple[int, int], ...]  # where these differ

    def is_all(self, number: Number) -> bool:
        """Return whether that number equals every wrong report, wherever there is one."""
        known = [(self.shown[at], other) for at in self.odd if (other := number(*at)) is not None]
        return bool(known) and all(math.isclose(shown, other, rel_tol=EXACT) for shown, other in known)

    def ratio(self, at: tuple[int, int]) -> float:
        return self.shown[at] / (self.right[at] or math.nan)


def wrong_reports(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    for check, what in SHOWN.items():
        if check not in broken or silences(trial, "", READ[check]) or not (reported := reported_of(trial, check)):
            continue
        steps = sorted({step for _, step in reported.odd})
        when = f" in step {', '.join(map(str, steps))}" * ({*steps} != {step for _, step in reported.shown})
        where = (on_ranks(trial, {rank for rank, _ in reported.odd}) + when).strip()
        for details, number, hint in _whose(trial, reported):
            text = f"the {what} is reported {phrase(details)}"
            cause = Cause(
                "wrong report", text, where, hint=hint or _coarse(reported), details=(("report", what), *details)
            )
            assume = partial(assuming_reports, reported=reported, number=number)
            yield Hypothesis(cause, assume, lines=(finding_line(broken[check]),))


def _coarse(reported: Reported) -> str:
    """Say of which coarser format all that was reported is, two different numbers at least; empty if of none."""
    shown = np.array([*reported.shown.values()])
    alike = (form for form in ("bfloat16", "float16") if np.array_equal(shown, ROUNDED[form](shown)))
    form = next(alike, "") if len({*shown.tolist()}) > 1 else ""
    return form and f"all {len(shown)} reported ones are numbers of {form}"


def odd_reports(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """What is silent, and what is no other number of the run; where training is wrong too, that may follow from its numbers."""
    for check, what in ((check, what) for check, what in SHOWN.items() if check in broken):
        reported = reported_of(trial, check)
        if silences(trial, "", READ[check]):
            yield seen(broken, check, "report lacking", f"the reported {what} is lacking in some steps")
        elif reported is None and any(one.quantity == "reported largest loss" for one in broken[check].findings):
            yield seen(broken, check, "wrong report", "the reported largest loss is wrong")
        elif reported and (not WRONG & {*broken} or all(number_text(reported.ratio(at)) == "1" for at in reported.odd)):
            text = ": ".join(filter(None, [f"the reported {what} is wrong", _coarse(reported)]))
            yield replace(seen(broken, check, "wrong report", text), symptom=True)


def phrase(details: Sequence[tuple[str, object]]) -> str:
    """Say what a number is: not reduced over dp_shard and tp."""
    values = [(name, number_text(value) if isinstance(value, float) else value) for name, value in details]
    texts = {name: " and ".join(v) if isinstance(v, tuple) else v for name, v in values}
    return ", ".join(f"{v} times as large" if name == "times" else f"{name} {v}" for name, v in texts.items())


def assuming_reports(trial: Trial, reported: Reported, number: Number) -> Trial:
    def instead(rank: int, step: int) -> float:
        known = number(rank, step) if (rank, step) in reported.odd else reported.right[rank, step]
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
        return record.lr if record else next((one.lr for one in trial.reference.steps if one.step == step), None)
    if check == "reported_loss":
        return _loss(trial, {rank: [*trial.ranks]}, None, False, 1.0, rank, step) if record else None
    if record is None or not any(one.gradients for _, one in trial.own_steps() if one.step == step):
        return None
    if _copies_differ(trial, step) or unplanned_gradients(trial):
        return None
    return norm_of(trial, rank, step)


def unplanned_gradients(trial: Trial) -> bool:
    """Return whether a gradient is of a parameter that the plan lacks: which slices of it are copies, and so the norm of all
    gradients, is unknown then."""
    return any(fqn not in trial.plan.shapes for _, step in trial.own_steps() for fqn in step.gradients)


def _copies_differ(trial: Trial, step: int) -> bool:
    """Whether two stages have other gradients of one tied weight: then nothing says which of both counts in the norm."""
    seen = {rank: record.gradients for rank, record in trial.own_steps() if record.step == step}
    pairs = ((seen.get(one, {}), seen.get(other, {})) for one, *_, other in _ends(trial))
    return any(
        a[fqn].shape == b[fqn].shape and not np.allclose(a[fqn], b[fqn], rtol=1e-6, atol=0)
        for a, b in pairs
        for fqn in a.keys() & b.keys()
    )


def _ends(trial: Trial) -> tuple[tuple[int, ...], ...]:
    """The ranks of first and last stage that share a weight."""
    axis = tied_axis(trial.case)
    return trial.plan.groups[axis] if axis else ()


# ---- the table of sources


def _whose(trial: Trial, reported: Reported) -> Iterator[tuple[tuple[tuple[str, object], ...], Number, str]]:
    """The first source that gives all, or multiples by a number of the case; and in words which number that may be."""
    for details, number in _sources(trial, reported.check):
        if reported.is_all(number):
            yield details, number, ""
            return
    ratio = reported.ratio(reported.odd[0])
    known = [*token_factors(trial, reported.odd[0][1], ratio)]
    if len({step for _, step in reported.odd}) > 1 and number_text(ratio) != "1":
        known.append((factor_text(trial, ratio), lambda step: ratio))
    for hint, by_step in known:
        multiple: Number = lambda rank, step, by=by_step: by(step) * reported.right[rank, step]  # type: ignore[misc]  # noqa: E731
        if reported.is_all(multiple):
            yield (("times", ratio),), multiple, hint.removeprefix(": ")


def _sources(trial: Trial, check: str) -> Iterator[Source]:
    """Parts of this number, that of other steps, other numbers, and this one rounded."""
    right, limit = partial(on_record, trial, check), trial.case.training.max_norm

    def made(by: Callable[[float], float]) -> Number:
        return lambda rank, step: None if (known := right(rank, step)) is None else by(known)

    yield from _losses(trial) if check == "reported_loss" else norms(trial) if check == "grad_norm" else ()
    if check == "grad_norm" and limit is not None:
        yield (("after clipping to", limit),), made(lambda norm: norm * clip_coefficient(norm, limit))
        yield (("after clipping to", limit),), made(lambda norm: min(norm, limit))
    for value in (0.0, trial.case.training.lr):
        yield (("always as", value),), made(lambda _, value=value: value)  # type: ignore[misc]
    yield from of_other_steps(trial, right)
    yield from (((("as the", SHOWN[one]),), partial(on_record, trial, one)) for one in SHOWN if one != check)
    yield (("rounded to", "float32"),), made(lambda number: float(np.float32(number)))


def of_other_steps(trial: Trial, right: Number) -> Iterator[Source]:
    """The same of another step, and what is kept of all steps so far."""
    steps = trial.case.steps
    for one in steps:
        yield (("of step", one),), lambda rank, step, one=one: right(rank, one)  # type: ignore[misc]
    for by in (sign * n for sign in (-1, 1) for n in range(1, len(steps))):
        name = f"as that of {abs(by)} step{'s' * (abs(by) > 1)}"
        yield ((name, "before" if by < 0 else "later"),), lambda rank, step, by=by: right(rank, step + by)  # type: ignore[misc]
    yield (("as the sum of", "all steps so far"),), partial(_so_far, trial, right, lambda n: (1, 1), False)
    yield (
        (("as the mean of", "all steps so far"),),
        partial(_so_far, trial, right, lambda n: (n / (n + 1), 1 / (n + 1)), False),
    )
    for share in KEPT:
        yield (("as a running mean that keeps", share),), partial(_so_far, trial, right, partial(_mixed, share), False)
    total = "as a total of all steps so far, that of before counted times"
    for by in range(1, len(trial.ranks) + 1):  # ranks that bring along what has been reduced over them
        yield ((total, by),), partial(_so_far, trial, right, lambda n, by=by: (by, 1), True)  # type: ignore[misc]


def _mixed(kept: float, n: int) -> tuple[float, float]:
    return (kept, 1 - kept) if n else (0, 1)


def _so_far(trial: Trial, right: Number, shares: Shares, tokens: bool, rank: int, step: int) -> float | None:
    """tokens: as sums over them."""
    total, weight = 0.0, 1.0
    for n, number in enumerate(range(trial.first_step, step + 1)):
        weight = trial.reference_step(number).valid_tokens if tokens else 1
        if (known := right(rank, number)) is None:
            return None
        total = shares(n)[0] * total + shares(n)[1] * weight * known
    return total / weight


def sets_of_ranks(trial: Trial, axes: Sequence[str] = AXES) -> Iterator[tuple[tuple[tuple[str, object], ...], Ranks]]:
    """Yield sets by the axes that a sum is not reduced over, few first; then one rank alone, for all."""
    present = [axis for axis in AXES if getattr(trial.case.dims, axis) > 1]
    for count in range(1, len(present) + 1):
        for missing in itertools.combinations([axis for axis in present if axis in axes], count):
            along = [axis for axis in present if axis not in missing]
            those = groups(trial.case.dims, *along) if along else [(rank,) for rank in trial.ranks]
            yield (("not reduced over", missing),), {rank: group for group in those for rank in group}
    yield from (((("of rank", one),), dict.fromkeys(trial.ranks, (one,))) for one in sorted(trial.ranks))


def _losses(trial: Trial) -> Iterator[Source]:
    """Yield losses of some ranks and all microbatches, one, the first or the last ones, over their tokens or all.

    They may be times a number of microbatches.
    """
    passes = trial.case.passes
    every = (), dict.fromkeys(trial.ranks, [*trial.ranks])
    numbers: list[tuple[int, int] | None] = [None, *((one, one) for one in range(1, passes + 1) if passes > 1)]
    numbers += [(1, last) for last in range(2, passes)] + [(first, passes) for first in range(2, passes)]
    table = itertools.product((every, *sets_of_ranks(trial, SPLIT)), numbers, (False, True))
    for (details, ranks), number, whole in table:
        first, last = number or (0, 0)
        some = ("of microbatches", f"{first}-{last}") if last > first else ("of microbatch", first)
        more = (some, ("over the tokens of", whole and "the step"))
        of = (*details, *(one for one in more if one[1]))
        for factor in (
            dict.fromkeys((1.0, passes, 1 / passes))
            if number or (details and not (whole and details[0][0] == "of rank"))
            else ()
        ):
            times = (("times", factor),) if factor != 1 else ()
            yield (*of, *times), partial(_loss, trial, ranks, number, whole, factor)
    for of_each in ("ranks", "microbatches"):
        yield (("as a mean of means of", of_each),), partial(_mean_of_means, trial, of_each)
    for ((_, axes),), _ in sets_of_ranks(trial, SPLIT):
        if isinstance(axes, tuple):
            yield (("as a mean of means along", axes),), partial(_means_along, trial, axes, False)
            yield (("as a sum of means along", axes),), partial(_means_along, trial, axes, True)


def _loss(
    trial: Trial, ranks: Ranks, number: tuple[int, int] | None, whole: bool, factor: float, rank: int, step: int
) -> float | None:
    """number: the first and the last microbatch, from 1; None: all."""
    chosen = slice(number[0] - 1, number[1]) if number else slice(None)
    parts = [one for of in _parts(trial, ranks[rank], rank, step) for one in of[chosen]]
    count = trial.reference_step(step).valid_tokens if whole else sum(count for _, count in parts)
    return factor * math.fsum(total for total, _ in parts) / count if parts and count else None


def _mean_of_means(trial: Trial, of: str, rank: int, step: int) -> float | None:
    seen = [parts for parts in _parts(trial, [*trial.ranks], rank, step) if parts]
    seen = [[one] for parts in seen for one in parts] if of == "microbatches" else seen
    means = [math.fsum(s for s, _ in parts) / count for parts in seen if (count := sum(count for _, count in parts))]
    return math.fsum(means) / len(means) if means else None


def _means_along(trial: Trial, axes: tuple[str, ...], summed: bool, rank: int, step: int) -> float | None:
    """Each place along these axes has the mean of its own tokens; their sum or their mean."""
    places = {one: coordinate(trial.case.dims, one) for one in trial.ranks}
    members: dict[tuple[int, ...], list[int]] = {}
    for one, place in places.items():
        members.setdefault(tuple(place[axis] for axis in axes), []).append(one)
    means = [_loss(trial, {rank: own}, None, False, 1.0, rank, step) for own in members.values()]
    known = [mean for mean in means if mean is not None]
    return math.fsum(known) / (1 if summed else len(known)) if len(known) == len(means) else None


def _parts(trial: Trial, ranks: Sequence[int], rank: int, step: int) -> list[list[tuple[float, int]]]:
    """(loss, tokens) of these ranks' microbatches; of tp peers, who compute the same, of those at the place of the rank."""
    places = {one: coordinate(trial.case.dims, one)["tp"] for one in trial.ranks}
    return [losses(trial, one, step) for one in ranks if places.get(one) == places[rank]]


def norms(trial: Trial, of: str = GRADIENTS) -> Iterator[Source]:
    """Yield norms of the tensors of some ranks or parameters, or norms that are counted in another way."""
    by = partial(norm_of, trial, of=of)
    all_of_it = cache(by)
    yield from ((details, partial(by, ranks=ranks)) for details, ranks in sets_of_ranks(trial))
    yield from (((("with replicas counted along", axis),), partial(by, again=axis)) for axis in AXES)
    shapes, every = trial.case.model.parameter_shapes(), {*trial.plan.shapes}
    vectors = {fqn for fqn in every if len(shapes.get(fqn, ())) == 1}
    ends = {fqn for fqn in every if not fqn.startswith("layers.")} - vectors
    for name, some in (("norm weights", vectors), ("embedding and output", ends)):
        yield (("of", name),), partial(by, fqns=some)
        yield (("without", name),), partial(by, fqns=every - some)
    yield from (((("of norm type", power),), partial(by, power=power)) for power in (1.0, math.inf))
    for name, parts in groupings(trial).items():
        each = [partial(by, fqns=fqns) for fqns in parts]
        yield (("added up over", name),), lambda r, s, each=each: math.fsum(one(r, s) for one in each)  # type: ignore[misc]
    yield (("to the power of", 2),), lambda rank, step: by(rank, step) ** 2
    for name, fqns in _families(trial).items():
        whole = cache(partial(by, fqns=fqns))
        yield (("with", f"{name} counted twice"),), partial(_changed, all_of_it, [(1, whole)])
        yield (("with", f"{name} left out"),), partial(_changed, all_of_it, [(-1, whole)])
        for how, ranks in _lacking(trial, fqns):
            part = partial(by, fqns=fqns, ranks=ranks)
            yield (("with", f"{name} {how}"),), partial(_changed, all_of_it, [(-1, whole), (1, part)])


def _families(trial: Trial) -> dict[str, set[str]]:
    """Each parameter by itself, and those of one name in all layers."""
    found = {fqn: {fqn} for fqn in trial.plan.shapes}
    for fqn in trial.plan.shapes:
        head, *rest = fqn.split(".")
        if head == "layers":
            found.setdefault(".".join([head, "*", *rest[1:]]), set()).add(fqn)
    return found


def _lacking(trial: Trial, fqns: Collection[str]) -> Iterator[tuple[str, Ranks]]:
    """Yield the ranks whose parts a norm has, if it lacks those of others along an axis that cuts these parameters."""
    slices = trial.plan.slices
    for axis in ("dp_shard", "tp"):
        lines = trial.plan.groups.get(axis, ())
        if any(slices[rank].get(fqn) != slices[line[0]].get(fqn) for line in lines for rank in line for fqn in fqns):
            along = [one for one in AXES if one != axis]
            own = {rank: group for group in groups(trial.case.dims, *along) for rank in group}
            yield f"not reduced over {axis}", own
            yield f"counted on rank 0 of {axis} alone", dict.fromkeys(own, own[0])


def _changed(by: Callable[..., float], terms: Sequence[tuple[int, Number]], rank: int, step: int) -> float:
    """Return the norm with the squares of others added so many times."""
    squares = [times * (one(rank, step) or 0.0) ** 2 for times, one in terms]
    if not all(map(math.isfinite, squares)):
        return math.nan
    more = math.fsum(squares)
    return math.sqrt(max(0.0, by(rank, step) ** 2 + more))


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
        found[name] = [{*fqns} for _, fqns in itertools.groupby(sorted(trial.plan.shapes, key=key), key)]
    return found


def norm_of(trial: Trial, rank: int, step: int, ranks: Ranks | None = None, **how: Any) -> float:
    """Return the norm of those ranks' slices as judge.norms has it, by default as this rank sees all."""
    return observed.norm_of(trial, step, ranks[rank] if ranks else observed.nearest(trial, rank), **how)
