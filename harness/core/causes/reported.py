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
    """Reports of one kind of number, and the numbers that were seen."""

    check: str
    """The check that judges these reports."""
    shown: dict[tuple[int, int], float]
    """(rank, step) -> the reported number."""
    right: dict[tuple[int, int], float]
    """(rank, step) -> the number that was seen."""
    odd: tuple[tuple[int, int], ...]
    """The (rank, step) where these differ."""

    def is_all(self, number: Number) -> bool:
        """Return whether that number equals every wrong report, wherever there is one."""
        pairs = []
        for rank, step in self.odd:
            expected = number(rank, step)
            if expected is not None:
                pairs.append((self.shown[rank, step], expected))
        return bool(pairs) and all(math.isclose(shown, expected, rel_tol=EXACT) for shown, expected in pairs)

    def ratio(self, rank_and_step: tuple[int, int]) -> float:
        """Return the reported number divided by the right one; NaN where that is zero."""
        return self.shown[rank_and_step] / (self.right[rank_and_step] or math.nan)


def wrong_reports(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield that what ranks report is another number on record."""
    for check, noun in SHOWN.items():
        if check not in broken or silences(trial, "", READ[check]) or not (reported := reported_of(trial, check)):
            continue
        steps = sorted({step for _, step in reported.odd})
        where = on_ranks(trial, {rank for rank, _ in reported.odd})
        if {*steps} != {step for _, step in reported.shown}:
            where += f" in step {', '.join(map(str, steps))}"
        for details, number, hint in _whose(trial, reported):
            text = f"the {noun} is reported {phrase(details)}"
            cause = Cause(
                "wrong report",
                text,
                where.strip(),
                hint=hint or _coarse(reported),
                details=(("report", noun), *details),
            )
            assume = partial(assuming_reports, reported=reported, number=number)
            yield Hypothesis(cause, assume, lines=(finding_line(broken[check]),))


def _coarse(reported: Reported) -> str:
    """Return of which coarser format all that was reported is, two different numbers at least; empty if of none."""
    shown = np.array([*reported.shown.values()])
    if len({*shown.tolist()}) <= 1:
        return ""
    for format_name in ("bfloat16", "float16"):
        if np.array_equal(shown, ROUNDED[format_name](shown)):
            return f"all {len(shown)} reported ones are numbers of {format_name}"
    return ""


def odd_reports(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Yield reports that are silent, and those that are no other number of the run.

    Where training is wrong too, the latter may follow from its numbers.
    """
    for check, noun in SHOWN.items():
        if check not in broken:
            continue
        reported = reported_of(trial, check)
        if silences(trial, "", READ[check]):
            yield seen(broken, check, "report lacking", f"the reported {noun} is lacking in some steps")
        elif reported is None and any(
            finding.quantity == "reported largest loss" for finding in broken[check].findings
        ):
            yield seen(broken, check, "wrong report", "the reported largest loss is wrong")
        elif reported and (not WRONG & {*broken} or _rounds_to_right(reported)):
            text = ": ".join(filter(None, [f"the reported {noun} is wrong", _coarse(reported)]))
            yield replace(seen(broken, check, "wrong report", text), symptom=True)


def _rounds_to_right(reported: Reported) -> bool:
    """Return whether every wrong report divided by the right number is 1, as a person reads it."""
    return all(number_text(reported.ratio(rank_and_step)) == "1" for rank_and_step in reported.odd)


def phrase(details: Sequence[tuple[str, object]]) -> str:
    """Return what a number is, in words: not reduced over dp_shard and tp."""
    texts = {}
    for name, value in details:
        shown = number_text(value) if isinstance(value, float) else value
        texts[name] = " and ".join(shown) if isinstance(shown, tuple) else shown
    phrases = []
    for name, text in texts.items():
        phrases.append(f"{text} times as large" if name == "times" else f"{name} {text}")
    return ", ".join(phrases)


def assuming_reports(trial: Trial, reported: Reported, number: Number) -> Trial:
    """Assume that ranks should report this number where their reports are wrong."""

    def number_or_shown(rank: int, step: int) -> float:
        expected = number(rank, step) if (rank, step) in reported.odd else reported.right[rank, step]
        return reported.shown[rank, step] if expected is None else expected

    return trial.assuming(reports={reported.check: number_or_shown})


def reported_of(trial: Trial, check: str) -> Reported | None:
    """Return what ranks report of one kind, and what was seen of it. None where they agree, or where that is not known."""
    shown = {}
    right = {}
    for rank, record, _ in trial.steps():
        number = READ[check](record)
        right_number = on_record(trial, check, rank, record.step)
        if number is not None and right_number is not None and math.isfinite(right_number):
            shown[rank, record.step] = number
            right[rank, record.step] = right_number
    bounds = {"reported_loss": trial.bounds.loss, "grad_norm": trial.bounds.grad_norm}.get(check, {})
    wrong = []
    for rank, step in shown:
        difference = abs(shown[rank, step] - right[rank, step])
        if not difference <= bounds.get(step, CLOSE) * abs(right[rank, step]):
            wrong.append((rank, step))
    return Reported(check, shown, right, tuple(wrong)) if wrong else None


def on_record(trial: Trial, check: str, rank: int, step: int) -> float | None:
    """Return the loss, norm or rate that a step had. None where there is no such step; a rate's may be the schedule's."""
    record = next((record for record in trial.ranks[rank].steps if record.step == step), None)
    if check == "reported_rate":
        if record:
            return record.lr
        return next((planned.lr for planned in trial.reference.steps if planned.step == step), None)
    if check == "reported_loss":
        return _loss(trial, {rank: [*trial.ranks]}, None, False, 1.0, rank, step) if record else None
    if record is None or not any(own_step.gradients for _, own_step in trial.own_steps() if own_step.step == step):
        return None
    if _copies_differ(trial, step) or unplanned_gradients(trial):
        return None
    return norm_of(trial, rank, step)


def unplanned_gradients(trial: Trial) -> bool:
    """Return whether a gradient is of a parameter that the plan lacks.

    Then it is unknown which slices of it are copies, and so is the norm of all gradients.
    """
    fqns = set[str]()
    for _, step in trial.own_steps():
        fqns.update(step.gradients)
    return not fqns <= trial.plan.shapes.keys()


def _copies_differ(trial: Trial, step: int) -> bool:
    """Return whether two stages have other gradients of one tied weight: then nothing says which of both counts in the norm."""
    gradients = {rank: record.gradients for rank, record in trial.own_steps() if record.step == step}
    for first_rank, *_, last_rank in _ends(trial):
        first = gradients.get(first_rank, {})
        last = gradients.get(last_rank, {})
        for fqn in first.keys() & last.keys():
            if first[fqn].shape == last[fqn].shape and not np.allclose(first[fqn], last[fqn], rtol=1e-6, atol=0):
                return True
    return False


def _ends(trial: Trial) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of first and last stage that share a weight, group by group."""
    axis = tied_axis(trial.case)
    return trial.plan.groups[axis] if axis else ()


# ---- the table of sources


def _whose(trial: Trial, reported: Reported) -> Iterator[tuple[tuple[tuple[str, object], ...], Number, str]]:
    """Yield the first source that gives all, or multiples by a number of the case; and in words which number that may be."""
    for details, number in _sources(trial, reported.check):
        if reported.is_all(number):
            yield details, number, ""
            return
    ratio = reported.ratio(reported.odd[0])
    factors = [*token_factors(trial, reported.odd[0][1], ratio)]
    if len({step for _, step in reported.odd}) > 1 and number_text(ratio) != "1":
        factors.append((factor_text(trial, ratio), lambda step: ratio))
    for hint, by_step in factors:
        multiple: Number = lambda rank, step, by_step=by_step: by_step(step) * reported.right[rank, step]  # type: ignore[misc]  # noqa: E731
        if reported.is_all(multiple):
            yield (("times", ratio),), multiple, hint.removeprefix(": ")


def _sources(trial: Trial, check: str) -> Iterator[Source]:
    """Yield parts of this number, that of other steps, other numbers, and this one rounded."""
    right = partial(on_record, trial, check)
    limit = trial.case.training.max_norm

    def apply_to_right(change: Callable[[float], float]) -> Number:
        return lambda rank, step: None if (right_number := right(rank, step)) is None else change(right_number)

    if check == "reported_loss":
        yield from _losses(trial)
    elif check == "grad_norm":
        yield from norms(trial)
    if check == "grad_norm" and limit is not None:
        yield (("after clipping to", limit),), apply_to_right(lambda norm: norm * clip_coefficient(norm, limit))
        yield (("after clipping to", limit),), apply_to_right(lambda norm: min(norm, limit))
    for value in (0.0, trial.case.training.lr):
        yield (("always as", value),), apply_to_right(lambda _, value=value: value)  # type: ignore[misc]
    yield from of_other_steps(trial, right)
    for other_check, noun in SHOWN.items():
        if other_check != check:
            yield (("as the", noun),), partial(on_record, trial, other_check)
    yield (("rounded to", "float32"),), apply_to_right(lambda number: float(np.float32(number)))


def of_other_steps(trial: Trial, right: Number) -> Iterator[Source]:
    """Yield this number of another step, and what is kept of all steps so far."""
    steps = trial.case.steps
    for other_step in steps:
        yield (("of step", other_step),), lambda rank, step, other_step=other_step: right(rank, other_step)  # type: ignore[misc]
    for sign in (-1, 1):
        for count in range(1, len(steps)):
            distance = sign * count
            name = f"as that of {count} step{'s' if count > 1 else ''}"
            side = "before" if sign < 0 else "later"
            yield ((name, side),), lambda rank, step, distance=distance: right(rank, step + distance)  # type: ignore[misc]
    yield (("as the sum of", "all steps so far"),), partial(_so_far, trial, right, lambda n: (1, 1), False)
    yield (
        (("as the mean of", "all steps so far"),),
        partial(_so_far, trial, right, lambda n: (n / (n + 1), 1 / (n + 1)), False),
    )
    for share in KEPT:
        yield (("as a running mean that keeps", share),), partial(_so_far, trial, right, partial(_mixed, share), False)
    name = "as a total of all steps so far, that of before counted times"
    for times in range(1, len(trial.ranks) + 1):  # ranks that bring along what has been reduced over them
        yield ((name, times),), partial(_so_far, trial, right, lambda n, times=times: (times, 1), True)  # type: ignore[misc]


def _mixed(kept: float, n: int) -> tuple[float, float]:
    """Return how often the mean so far and the n-th number count in a running mean that keeps this share."""
    return (kept, 1 - kept) if n else (0, 1)


def _so_far(trial: Trial, right: Number, shares: Shares, tokens: bool, rank: int, step: int) -> float | None:
    """Return the total of a number over all steps up to this one. None where the number of one of them is not known.

    tokens: whether the numbers are summed as sums over tokens, and divided by the tokens of the last step.
    """
    total = 0.0
    weight = 1.0
    for n, number in enumerate(range(trial.first_step, step + 1)):
        weight = trial.reference_step(number).valid_tokens if tokens else 1
        if (number_of_step := right(rank, number)) is None:
            return None
        total = shares(n)[0] * total + shares(n)[1] * weight * number_of_step
    return total / weight


def sets_of_ranks(trial: Trial, axes: Sequence[str] = AXES) -> Iterator[tuple[tuple[tuple[str, object], ...], Ranks]]:
    """Yield sets by the axes that a sum is not reduced over, few first; then one rank alone, for all."""
    present = [axis for axis in AXES if getattr(trial.case.dims, axis) > 1]
    for count in range(1, len(present) + 1):
        for missing in itertools.combinations([axis for axis in present if axis in axes], count):
            reduced_over = [axis for axis in present if axis not in missing]
            sets = groups(trial.case.dims, *reduced_over) if reduced_over else [(rank,) for rank in trial.ranks]
            set_of_rank: dict[int, tuple[int, ...]] = {}
            for group in sets:
                set_of_rank.update(dict.fromkeys(group, group))
            yield (("not reduced over", missing),), set_of_rank
    for rank in sorted(trial.ranks):
        yield (("of rank", rank),), dict.fromkeys(trial.ranks, (rank,))


def _losses(trial: Trial) -> Iterator[Source]:
    """Yield losses of some ranks and all microbatches, one, the first or the last ones, over their tokens or all.

    They may be times a number of microbatches.
    """
    passes = trial.case.passes
    all_ranks = (), dict.fromkeys(trial.ranks, [*trial.ranks])
    ranges: list[tuple[int, int] | None] = [None]
    if passes > 1:
        ranges += [(number, number) for number in range(1, passes + 1)]
    ranges += [(1, last) for last in range(2, passes)] + [(first, passes) for first in range(2, passes)]
    table = itertools.product((all_ranks, *sets_of_ranks(trial, SPLIT)), ranges, (False, True))
    for (details, ranks), microbatches, over_step_tokens in table:
        first, last = microbatches or (0, 0)
        words: list[tuple[str, object]] = [*details]
        if last > first:
            words.append(("of microbatches", f"{first}-{last}"))
        elif first:
            words.append(("of microbatch", first))
        if over_step_tokens:
            words.append(("over the tokens of", "the step"))
        factors: list[float] = []
        if microbatches or (details and not (over_step_tokens and details[0][0] == "of rank")):
            factors = [*dict.fromkeys((1.0, passes, 1 / passes))]
        for factor in factors:
            times = (("times", factor),) if factor != 1 else ()
            yield (*words, *times), partial(_loss, trial, ranks, microbatches, over_step_tokens, factor)
    for summands in ("ranks", "microbatches"):
        yield (("as a mean of means of", summands),), partial(_mean_of_means, trial, summands)
    for ((_, axes),), _ in sets_of_ranks(trial, SPLIT):
        if isinstance(axes, tuple):
            yield (("as a mean of means along", axes),), partial(_means_along, trial, axes, False)
            yield (("as a sum of means along", axes),), partial(_means_along, trial, axes, True)


def _loss(
    trial: Trial,
    ranks: Ranks,
    microbatches: tuple[int, int] | None,
    over_step_tokens: bool,
    factor: float,
    rank: int,
    step: int,
) -> float | None:
    """Return the mean loss of some microbatches of some ranks, times a factor. None if no such loss was seen.

    microbatches: the first and the last one, from 1; None: all. over_step_tokens: divide by the tokens of the step, not by
    theirs.
    """
    chosen = slice(microbatches[0] - 1, microbatches[1]) if microbatches else slice(None)
    parts: list[tuple[float, int]] = []
    for losses_of_rank in _parts(trial, ranks[rank], rank, step):
        parts += losses_of_rank[chosen]
    count = trial.reference_step(step).valid_tokens if over_step_tokens else sum(count for _, count in parts)
    return factor * math.fsum(total for total, _ in parts) / count if parts and count else None


def _mean_of_means(trial: Trial, summands: str, rank: int, step: int) -> float | None:
    """Return the mean of the mean losses of all ranks, or of all microbatches. None if no loss was seen."""
    sets: list[list[tuple[float, int]]] = []
    for losses_of_rank in _parts(trial, [*trial.ranks], rank, step):
        if summands == "microbatches":
            sets += [[microbatch] for microbatch in losses_of_rank]
        elif losses_of_rank:
            sets.append(losses_of_rank)
    means = []
    for losses_of_set in sets:
        count = sum(tokens for _, tokens in losses_of_set)
        if count:
            means.append(math.fsum(total for total, _ in losses_of_set) / count)
    return math.fsum(means) / len(means) if means else None


def _means_along(trial: Trial, axes: tuple[str, ...], summed: bool, rank: int, step: int) -> float | None:
    """Return the sum or the mean of mean losses: each mesh coordinate along these axes has that of its own tokens.

    None if one of them is not known.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for member in trial.ranks:
        mesh_coordinate = coordinate(trial.case.dims, member)
        members.setdefault(tuple(mesh_coordinate[axis] for axis in axes), []).append(member)
    means = [_loss(trial, {rank: ranks}, None, False, 1.0, rank, step) for ranks in members.values()]
    known_means = [mean for mean in means if mean is not None]
    return math.fsum(known_means) / (1 if summed else len(known_means)) if len(known_means) == len(means) else None


def _parts(trial: Trial, ranks: Sequence[int], rank: int, step: int) -> list[list[tuple[float, int]]]:
    """Return (loss, tokens) of these ranks' microbatches, rank by rank.

    Of tp peers, who compute the same, only those with the tp index of the rank count.
    """
    tp_index = {other: coordinate(trial.case.dims, other)["tp"] for other in trial.ranks}
    return [losses(trial, other, step) for other in ranks if tp_index.get(other) == tp_index[rank]]


def norms(trial: Trial, kind: str = GRADIENTS) -> Iterator[Source]:
    """Yield norms of the tensors of some ranks or parameters, or norms that are counted in another way."""
    norm = partial(norm_of, trial, of=kind)
    full_norm = cache(norm)
    for details, ranks in sets_of_ranks(trial):
        yield details, partial(norm, ranks=ranks)
    for axis in AXES:
        yield (("with replicas counted along", axis),), partial(norm, again=axis)
    shapes = trial.case.model.parameter_shapes()
    all_fqns = {*trial.plan.shapes}
    vectors = {fqn for fqn in all_fqns if len(shapes.get(fqn, ())) == 1}
    ends = {fqn for fqn in all_fqns if not fqn.startswith("layers.")} - vectors
    for name, fqns in (("norm weights", vectors), ("embedding and output", ends)):
        yield (("of", name),), partial(norm, fqns=fqns)
        yield (("without", name),), partial(norm, fqns=all_fqns - fqns)
    for power in (1.0, math.inf):
        yield (("of norm type", power),), partial(norm, power=power)
    for name, parts in groupings(trial).items():
        norms_of_parts = [partial(norm, fqns=part) for part in parts]
        yield (("added up over", name),), partial(_sum_of, norms_of_parts)
    yield (("to the power of", 2),), lambda rank, step: norm(rank, step) ** 2
    for name, family in _families(trial).items():
        family_norm = cache(partial(norm, fqns=family))
        yield (("with", f"{name} counted twice"),), partial(_changed, full_norm, [(1, family_norm)])
        yield (("with", f"{name} left out"),), partial(_changed, full_norm, [(-1, family_norm)])
        for how, ranks in _lacking(trial, family):
            part_norm = partial(norm, fqns=family, ranks=ranks)
            yield (("with", f"{name} {how}"),), partial(_changed, full_norm, [(-1, family_norm), (1, part_norm)])


def _sum_of(norms_of_parts: Sequence[Callable[[int, int], float]], rank: int, step: int) -> float:
    """Return the sum of several norms, each as the rank sees it."""
    return math.fsum(norm(rank, step) for norm in norms_of_parts)


def _families(trial: Trial) -> dict[str, set[str]]:
    """Return each parameter by itself, and those of one name in all layers."""
    families = {fqn: {fqn} for fqn in trial.plan.shapes}
    for fqn in trial.plan.shapes:
        head, *path = fqn.split(".")
        if head == "layers":
            families.setdefault(".".join([head, "*", *path[1:]]), set()).add(fqn)
    return families


def _lacking(trial: Trial, fqns: Collection[str]) -> Iterator[tuple[str, Ranks]]:
    """Yield the ranks whose parts a norm has, if it lacks those of others along an axis that cuts these parameters."""
    for axis in ("dp_shard", "tp"):
        if _is_cut_along(trial, axis, fqns):
            other_axes = [other for other in AXES if other != axis]
            group_of_rank: dict[int, tuple[int, ...]] = {}
            for group in groups(trial.case.dims, *other_axes):
                group_of_rank.update(dict.fromkeys(group, group))
            yield f"not reduced over {axis}", group_of_rank
            yield f"counted on rank 0 of {axis} alone", dict.fromkeys(group_of_rank, group_of_rank[0])


def _is_cut_along(trial: Trial, axis: str, fqns: Collection[str]) -> bool:
    """Return whether ranks of one group of an axis have different slices of one of these parameters."""
    slices = trial.plan.slices
    for group in trial.plan.groups.get(axis, ()):
        for rank in group:
            if any(slices[rank].get(fqn) != slices[group[0]].get(fqn) for fqn in fqns):
                return True
    return False


def _changed(norm: Callable[..., float], terms: Sequence[tuple[int, Number]], rank: int, step: int) -> float:
    """Return the norm with the squares of others added so many times."""
    squares = [times * (other_norm(rank, step) or 0.0) ** 2 for times, other_norm in terms]
    if not all(map(math.isfinite, squares)):
        return math.nan
    added = math.fsum(squares)
    return math.sqrt(max(0.0, norm(rank, step) ** 2 + added))


def groupings(trial: Trial) -> dict[str, list[set[str]]]:
    """Return the parameters that may have a norm of their own, by the name of the grouping."""
    shapes = trial.case.model.parameter_shapes()
    keys: dict[str, Callable[[str], str]] = {
        "parameters": lambda fqn: fqn,
        "layers": lambda fqn: ".".join(fqn.split(".")[:2]),
        "kinds of parameters": lambda fqn: str(len(shapes.get(fqn, ()))),
        "placements over tp": lambda fqn: str(tp_dim(fqn)),
    }
    sets = {"stages": [{*parameters_of_stage(trial.case, stage)} for stage in range(trial.case.n_stages)]}
    for name, key in keys.items():
        sets[name] = [{*fqns} for _, fqns in itertools.groupby(sorted(trial.plan.shapes, key=key), key)]
    return sets


def norm_of(trial: Trial, rank: int, step: int, ranks: Ranks | None = None, **how: Any) -> float:
    """Return the norm of those ranks' slices as judge.norms has it, by default as this rank sees all."""
    return observed.norm_of(trial, step, ranks[rank] if ranks else observed.nearest(trial, rank), **how)
