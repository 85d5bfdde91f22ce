"""Hypotheses that a number which ranks report is another number on record, for losses, norms and learning rates.

Reports are compared with what the ranks themselves did (losses, gradients, rates). So a wrong report is found also
where the training is wrong, and one that only repeats what is wrong is not blamed. Gradients may be clipped by the same
norms.
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
from harness.core.causes.hypothesis import Broken, Fact, Hypothesis, fact_of_first_finding
from harness.core.causes.words import finding_line, on_ranks_text
from harness.core.checks.reported_rate import FLOAT32_TOLERANCE
from harness.core.evidence.numbers import SPLIT
from harness.core.evidence.text import number_text
from harness.core.judge import norms as observed
from harness.core.judge.contents import ROUNDED
from harness.core.judge.losses import losses_of_rank
from harness.core.judge.norms import GRADIENTS
from harness.core.judge.reporting import Read, missing_report_findings
from harness.core.judge.result import Cause
from harness.core.judge.tolerance import clip_coefficient
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank, groups_along, tied_axis
from harness.core.plan.slices import tp_dim
from harness.core.plan.stages import parameters_of_stage

NumberOfStep = Callable[[int, int], float | None]
"""(rank, step) -> the number that the rank would report. None where it is not known."""
NamedNumber = tuple[tuple[tuple[str, object], ...], NumberOfStep]
"""A number on record: words and values that name it, and the number by rank and step."""
RankSets = Mapping[int, Sequence[int]]
"""Rank -> the ranks whose parts its number is made of."""
RunningShares = Callable[[int], tuple[float, float]]
"""(n) -> how often the total before the n-th step and its own number count."""

NOUNS = {"reported_loss": "loss", "grad_norm": "gradient norm", "reported_rate": "learning rate"}
REPORT_FIELDS = {"reported_loss": "reported_loss", "grad_norm": "grad_norm", "reported_rate": "reported_lr"}
READERS: dict[str, Read] = {check: attrgetter(name) for check, name in REPORT_FIELDS.items()}
TRAINING_CHECKS = {"loss", "gradients", "update"}  # checks that what is reported may follow from
SAME_NUMBER = 1e-8  # a number is another one's, not only close to it
RUNNING_MEAN_SHARES = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)  # of a running mean


@dataclass(frozen=True)
class Reports:
    """The reports of one kind of number, beside the numbers that were observed."""

    check: str
    """The check that judges these reports."""
    reported_numbers: dict[tuple[int, int], float]
    """(rank, step) -> the reported number."""
    right_numbers: dict[tuple[int, int], float]
    """(rank, step) -> the number that was seen."""
    wrong_keys: tuple[tuple[int, int], ...]
    """The (rank, step) where these differ."""

    def matches_all(self, number: NumberOfStep) -> bool:
        """Return whether the number equals every wrong report for which it is known. False if it is known for none."""
        pairs = []
        for rank, step in self.wrong_keys:
            expected = number(rank, step)
            if expected is not None:
                pairs.append((self.reported_numbers[rank, step], expected))
        return bool(pairs) and all(math.isclose(shown, expected, rel_tol=SAME_NUMBER) for shown, expected in pairs)

    def ratio_to_right(self, rank_and_step: tuple[int, int]) -> float:
        """Return the reported number divided by the observed one; NaN where that is zero."""
        return self.reported_numbers[rank_and_step] / (self.right_numbers[rank_and_step] or math.nan)


def wrong_reports(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield the hypotheses that what ranks report, of losses, norms or rates, is another number on record.

    Nothing for a kind of number that is right, that ranks do not report in some steps, or that equals no known one.
    """
    for check, noun in NOUNS.items():
        if (
            check not in broken
            or missing_report_findings(trial, "", READERS[check])
            or not (reported := reports_of(trial, check))
        ):
            continue
        steps = sorted({step for _, step in reported.wrong_keys})
        where = on_ranks_text(trial, {rank for rank, _ in reported.wrong_keys})
        if {*steps} != {step for _, step in reported.reported_numbers}:
            where += f" in step {', '.join(map(str, steps))}"
        for details, number, hint in _matching_sources(trial, reported):
            text = f"the {noun} is reported {details_text(details)}"
            cause = Cause(
                "wrong report",
                text,
                where.strip(),
                hint=hint or _coarse_format_text(reported),
                details=(("report", noun), *details),
            )
            assume = partial(assume_reports, reported=reported, number=number)
            yield Hypothesis(cause, assume, lines=(finding_line(broken[check]),))


def _coarse_format_text(reported: Reports) -> str:
    """Return a text of the coarser format (bfloat16, float16) whose numbers all reports are. Empty if there is none.

    Empty as well if all reports are one and the same number.
    """
    shown = np.array([*reported.reported_numbers.values()])
    if len({*shown.tolist()}) <= 1:
        return ""
    for format_name in ("bfloat16", "float16"):
        if np.array_equal(shown, ROUNDED[format_name](shown)):
            return f"all {len(shown)} reported ones are numbers of {format_name}"
    return ""


def facts_of_wrong_reports(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Yield facts on failing checks of reports: a report that is lacking in some steps, or a number that is wrong.

    Where training is wrong too, the latter is left out, as it may follow, unless it is right up to a person's rounding.
    """
    for check, noun in NOUNS.items():
        if check not in broken:
            continue
        reported = reports_of(trial, check)
        if missing_report_findings(trial, "", READERS[check]):
            yield fact_of_first_finding(
                broken, check, "report lacking", f"the reported {noun} is lacking in some steps"
            )
        elif reported is None and any(
            finding.quantity == "reported largest loss" for finding in broken[check].findings
        ):
            yield fact_of_first_finding(broken, check, "wrong report", "the reported largest loss is wrong")
        elif reported and (not TRAINING_CHECKS & {*broken} or _rounds_to_right(reported)):
            text = ": ".join(filter(None, [f"the reported {noun} is wrong", _coarse_format_text(reported)]))
            yield replace(fact_of_first_finding(broken, check, "wrong report", text), is_symptom=True)


def _rounds_to_right(reported: Reports) -> bool:
    """Return whether the ratio of every wrong report to the observed number is 1 as a text of a few digits."""
    return all(number_text(reported.ratio_to_right(rank_and_step)) == "1" for rank_and_step in reported.wrong_keys)


def details_text(details: Sequence[tuple[str, object]]) -> str:
    """Return a text of the words and values that name a number: "not reduced over dp_shard and tp"."""
    texts = {}
    for name, value in details:
        shown = number_text(value) if isinstance(value, float) else value
        texts[name] = " and ".join(shown) if isinstance(shown, tuple) else shown
    phrases = []
    for name, text in texts.items():
        phrases.append(f"{text} times as large" if name == "times" else f"{name} {text}")
    return ", ".join(phrases)


def assume_reports(trial: Trial, reported: Reports, number: NumberOfStep) -> Trial:
    """Return the trial as if ranks should report this number wherever their reports are wrong.

    Where the number is not known, what was reported counts as right.
    """

    def number_or_shown(rank: int, step: int) -> float:
        expected = number(rank, step) if (rank, step) in reported.wrong_keys else reported.right_numbers[rank, step]
        return reported.reported_numbers[rank, step] if expected is None else expected

    return trial.with_assumption(reports={reported.check: number_or_shown})


def reports_of(trial: Trial, check: str) -> Reports | None:
    """Return the reports of one check, with the numbers that were observed.

    None if all agree within the bounds, or are not known. Reports whose observed number is unknown or not finite are
    left out. Raises NoBound.
    """
    shown = {}
    right = {}
    for rank, record, _ in trial.steps_with_reference():
        number = READERS[check](record)
        right_number = recorded_number(trial, check, rank, record.step)
        if number is not None and right_number is not None and math.isfinite(right_number):
            shown[rank, record.step] = number
            right[rank, record.step] = right_number
    bounds = {"reported_loss": trial.bounds.loss, "grad_norm": trial.bounds.grad_norm}.get(check, {})
    wrong = []
    for rank, step in shown:
        difference = abs(shown[rank, step] - right[rank, step])
        if not difference <= bounds.get(step, FLOAT32_TOLERANCE) * abs(right[rank, step]):
            wrong.append((rank, step))
    return Reports(check, shown, right, tuple(wrong)) if wrong else None


def recorded_number(trial: Trial, check: str, rank: int, step: int) -> float | None:
    """Return the loss, norm or rate that a step really had on a rank, for a check that is a key of READERS.

    None if the step or its numbers are not on record. The rate of a step that is not on record is the schedule's. A
    norm is unknown if copies of a tied weight differ, or if the plan lacks a parameter.
    """
    record = next((record for record in trial.ranks[rank].steps if record.step == step), None)
    if check == "reported_rate":
        if record:
            return record.lr
        return next((planned.lr for planned in trial.reference.steps if planned.step == step), None)
    if check == "reported_loss":
        return _mean_loss(trial, {rank: [*trial.ranks]}, None, False, 1.0, rank, step) if record else None
    if record is None or not any(own_step.gradients for _, own_step in trial.own_steps() if own_step.step == step):
        return None
    if _copies_differ(trial, step) or unplanned_gradients(trial):
        return None
    return recorded_norm(trial, rank, step)


def unplanned_gradients(trial: Trial) -> bool:
    """Return whether a rank has a gradient of a parameter that the plan lacks.

    Then it is unknown which slices of it are copies, and so is the norm of all gradients.
    """
    fqns = set[str]()
    for _, step in trial.own_steps():
        fqns.update(step.gradients)
    return not fqns <= trial.plan.shapes.keys()


def _copies_differ(trial: Trial, step: int) -> bool:
    """Return whether two stages have different gradients of one tied weight in a step.

    Which of both counts in the norm is unknown then.
    """
    gradients = {rank: record.gradients for rank, record in trial.own_steps() if record.step == step}
    for first_rank, *_, last_rank in _tied_groups(trial):
        first = gradients.get(first_rank, {})
        last = gradients.get(last_rank, {})
        for fqn in first.keys() & last.keys():
            if first[fqn].shape == last[fqn].shape and not np.allclose(first[fqn], last[fqn], rtol=1e-6, atol=0):
                return True
    return False


def _tied_groups(trial: Trial) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks of first and last stage that share a tied weight. Empty if none do."""
    axis = tied_axis(trial.case)
    return trial.plan.groups[axis] if axis else ()


# ---- the table of sources


def _matching_sources(
    trial: Trial, reported: Reports
) -> Iterator[tuple[tuple[tuple[str, object], ...], NumberOfStep, str]]:
    """Yield (details, number, hint) of the first source that equals all wrong reports.

    If none does, yield the multiples of the right number that do. The hint is a text of the number of the case that the
    factor may be; empty for a source.
    """
    for details, number in _candidate_sources(trial, reported.check):
        if reported.matches_all(number):
            yield details, number, ""
            return
    ratio = reported.ratio_to_right(reported.wrong_keys[0])
    factors = [*token_factors(trial, reported.wrong_keys[0][1], ratio)]
    if len({step for _, step in reported.wrong_keys}) > 1 and number_text(ratio) != "1":
        factors.append((factor_text(trial, ratio), lambda step: ratio))
    for hint, by_step in factors:
        multiple: NumberOfStep = lambda rank, step, by_step=by_step: by_step(step) * reported.right_numbers[rank, step]  # type: ignore[misc]  # noqa: E731
        if reported.matches_all(multiple):
            yield (("times", ratio),), multiple, hint.removeprefix(": ")


def _candidate_sources(trial: Trial, check: str) -> Iterator[NamedNumber]:
    """Yield the numbers on record that a report of this check may be.

    They are parts of the right number, that of other steps, a constant, the other kinds of numbers, and the right one
    rounded.
    """
    right = partial(recorded_number, trial, check)
    limit = trial.case.training.max_norm

    def apply_to_right(change: Callable[[float], float]) -> NumberOfStep:
        return lambda rank, step: None if (right_number := right(rank, step)) is None else change(right_number)

    if check == "reported_loss":
        yield from _loss_sources(trial)
    elif check == "grad_norm":
        yield from norm_sources(trial)
    if check == "grad_norm" and limit is not None:
        yield (("after clipping to", limit),), apply_to_right(lambda norm: norm * clip_coefficient(norm, limit))
        yield (("after clipping to", limit),), apply_to_right(lambda norm: min(norm, limit))
    for value in (0.0, trial.case.training.lr):
        yield (("always as", value),), apply_to_right(lambda _, value=value: value)  # type: ignore[misc]
    yield from sources_of_other_steps(trial, right)
    for other_check, noun in NOUNS.items():
        if other_check != check:
            yield (("as the", noun),), partial(recorded_number, trial, other_check)
    yield (("rounded to", "float32"),), apply_to_right(lambda number: float(np.float32(number)))


def sources_of_other_steps(trial: Trial, right: NumberOfStep) -> Iterator[NamedNumber]:
    """Yield the numbers that are this number of another step, or a sum, mean or running total of all steps so far."""
    steps = trial.case.steps
    for other_step in steps:
        yield (("of step", other_step),), lambda rank, step, other_step=other_step: right(rank, other_step)  # type: ignore[misc]
    for sign in (-1, 1):
        for count in range(1, len(steps)):
            distance = sign * count
            name = f"as that of {count} step{'s' if count > 1 else ''}"
            side = "before" if sign < 0 else "later"
            yield ((name, side),), lambda rank, step, distance=distance: right(rank, step + distance)  # type: ignore[misc]
    yield (("as the sum of", "all steps so far"),), partial(_total_so_far, trial, right, lambda n: (1, 1), False)
    yield (
        (("as the mean of", "all steps so far"),),
        partial(_total_so_far, trial, right, lambda n: (n / (n + 1), 1 / (n + 1)), False),
    )
    for share in RUNNING_MEAN_SHARES:
        yield (
            (("as a running mean that keeps", share),),
            partial(_total_so_far, trial, right, partial(_running_shares, share), False),
        )
    name = "as a total of all steps so far, that of before counted times"
    for times in range(1, len(trial.ranks) + 1):  # ranks that bring along what has been reduced over them
        yield ((name, times),), partial(_total_so_far, trial, right, lambda n, times=times: (times, 1), True)  # type: ignore[misc]


def _running_shares(kept: float, n: int) -> tuple[float, float]:
    """Return how often the mean so far and the n-th number, from 0, count in a running mean. kept: the former."""
    return (kept, 1 - kept) if n else (0, 1)


def _total_so_far(
    trial: Trial, right: NumberOfStep, shares: RunningShares, tokens: bool, rank: int, step: int
) -> float | None:
    """Return the total of a number over all steps up to this one. None where the number of one of them is not known.

    shares: (n) -> how often the total so far and the n-th number count. tokens: whether the numbers are summed as sums
    over tokens, and divided by the tokens of the last step.
    """
    total = 0.0
    weight = 1.0
    for n, number in enumerate(range(trial.first_step, step + 1)):
        weight = trial.reference_step(number).valid_tokens if tokens else 1
        if (number_of_step := right(rank, number)) is None:
            return None
        total = shares(n)[0] * total + shares(n)[1] * weight * number_of_step
    return total / weight


def sets_of_ranks(
    trial: Trial, axes: Sequence[str] = AXES
) -> Iterator[tuple[tuple[tuple[str, object], ...], RankSets]]:
    """Yield (details, by rank the ranks of its set) for sums that are not reduced over some of `axes`, few first.

    Then yield each single rank as the set of all. Axes of degree 1 are left out.
    """
    present = [axis for axis in AXES if getattr(trial.case.dims, axis) > 1]
    for count in range(1, len(present) + 1):
        for missing in itertools.combinations([axis for axis in present if axis in axes], count):
            reduced_over = [axis for axis in present if axis not in missing]
            sets = groups_along(trial.case.dims, *reduced_over) if reduced_over else [(rank,) for rank in trial.ranks]
            set_of_rank: dict[int, tuple[int, ...]] = {}
            for group in sets:
                set_of_rank.update(dict.fromkeys(group, group))
            yield (("not reduced over", missing),), set_of_rank
    for rank in sorted(trial.ranks):
        yield (("of rank", rank),), dict.fromkeys(trial.ranks, (rank,))


def _loss_sources(trial: Trial) -> Iterator[NamedNumber]:
    """Yield the losses that a report may be: of some ranks and microbatches, over their tokens or the step's.

    Each may also be multiplied or divided by the number of microbatches. Then come means of means: of ranks,
    microbatches or axes.
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
            yield (*words, *times), partial(_mean_loss, trial, ranks, microbatches, over_step_tokens, factor)
    for summands in ("ranks", "microbatches"):
        yield (("as a mean of means of", summands),), partial(_mean_of_means, trial, summands)
    for ((_, axes),), _ in sets_of_ranks(trial, SPLIT):
        if isinstance(axes, tuple):
            yield (("as a mean of means along", axes),), partial(_combined_means_along, trial, axes, False)
            yield (("as a sum of means along", axes),), partial(_combined_means_along, trial, axes, True)


def _mean_loss(
    trial: Trial,
    ranks: RankSets,
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
    for losses in _losses_of_ranks(trial, ranks[rank], rank, step):
        parts += losses[chosen]
    count = trial.reference_step(step).valid_tokens if over_step_tokens else sum(count for _, count in parts)
    return factor * math.fsum(total for total, _ in parts) / count if parts and count else None


def _mean_of_means(trial: Trial, summands: str, rank: int, step: int) -> float | None:
    """Return the mean of the mean losses of all ranks, or of all microbatches. None if no loss was observed.

    summands: "ranks" or "microbatches".
    """
    sets: list[list[tuple[float, int]]] = []
    for losses in _losses_of_ranks(trial, [*trial.ranks], rank, step):
        if summands == "microbatches":
            sets += [[microbatch] for microbatch in losses]
        elif losses:
            sets.append(losses)
    means = []
    for losses_of_set in sets:
        count = sum(tokens for _, tokens in losses_of_set)
        if count:
            means.append(math.fsum(total for total, _ in losses_of_set) / count)
    return math.fsum(means) / len(means) if means else None


def _combined_means_along(trial: Trial, axes: tuple[str, ...], summed: bool, rank: int, step: int) -> float | None:
    """Return the sum (`summed`) or mean of the mean losses of each mesh coordinate along these axes.

    None if one of them is not known.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for member in trial.ranks:
        mesh_coordinate = coordinate_of_rank(trial.case.dims, member)
        members.setdefault(tuple(mesh_coordinate[axis] for axis in axes), []).append(member)
    means = [_mean_loss(trial, {rank: ranks}, None, False, 1.0, rank, step) for ranks in members.values()]
    known_means = [mean for mean in means if mean is not None]
    return math.fsum(known_means) / (1 if summed else len(known_means)) if len(known_means) == len(means) else None


def _losses_of_ranks(trial: Trial, ranks: Sequence[int], rank: int, step: int) -> list[list[tuple[float, int]]]:
    """Return (sum of losses, tokens) of the microbatches of each of these ranks, a list for each.

    Tp peers compute the same, so only ranks with the tp index of `rank` count.
    """
    tp_index = {other: coordinate_of_rank(trial.case.dims, other)["tp"] for other in trial.ranks}
    return [losses_of_rank(trial, other, step) for other in ranks if tp_index.get(other) == tp_index[rank]]


def norm_sources(trial: Trial, kind: str = GRADIENTS) -> Iterator[NamedNumber]:
    """Yield the norms that a report may be: of some ranks or parameters, or with parts that are counted in another way.

    kind: GRADIENTS or PARAMETERS, whose norm it is.
    """
    norm = partial(recorded_norm, trial, quantity=kind)
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
    for name, parts in parameter_groupings(trial).items():
        norms_of_parts = [partial(norm, fqns=part) for part in parts]
        yield (("added up over", name),), partial(_sum_of_norms, norms_of_parts)
    yield (("to the power of", 2),), lambda rank, step: norm(rank, step) ** 2
    for name, family in _parameter_families(trial).items():
        family_norm = cache(partial(norm, fqns=family))
        yield (("with", f"{name} counted twice"),), partial(_changed_norm, full_norm, [(1, family_norm)])
        yield (("with", f"{name} left out"),), partial(_changed_norm, full_norm, [(-1, family_norm)])
        for how, ranks in _incomplete_rank_sets(trial, family):
            part_norm = partial(norm, fqns=family, ranks=ranks)
            yield (("with", f"{name} {how}"),), partial(_changed_norm, full_norm, [(-1, family_norm), (1, part_norm)])


def _sum_of_norms(norms_of_parts: Sequence[Callable[[int, int], float]], rank: int, step: int) -> float:
    """Return the sum of several norms of a step, each as the rank sees it."""
    return math.fsum(norm(rank, step) for norm in norms_of_parts)


def _parameter_families(trial: Trial) -> dict[str, set[str]]:
    """Return sets of fqns by name: each parameter alone, and those of one name in all layers ("layers.*.name")."""
    families = {fqn: {fqn} for fqn in trial.plan.shapes}
    for fqn in trial.plan.shapes:
        head, *path = fqn.split(".")
        if head == "layers":
            families.setdefault(".".join([head, "*", *path[1:]]), set()).add(fqn)
    return families


def _incomplete_rank_sets(trial: Trial, fqns: Collection[str]) -> Iterator[tuple[str, RankSets]]:
    """Yield (words, rank sets) of the parts that a norm has if it is not reduced over an axis.

    Only axes that cut these parameters are tried.
    """
    for axis in ("dp_shard", "tp"):
        if _is_cut_along(trial, axis, fqns):
            other_axes = [other for other in AXES if other != axis]
            group_of_rank: dict[int, tuple[int, ...]] = {}
            for group in groups_along(trial.case.dims, *other_axes):
                group_of_rank.update(dict.fromkeys(group, group))
            yield f"not reduced over {axis}", group_of_rank
            yield f"counted on rank 0 of {axis} alone", dict.fromkeys(group_of_rank, group_of_rank[0])


def _is_cut_along(trial: Trial, axis: str, fqns: Collection[str]) -> bool:
    """Return whether ranks of one group of an axis have different planned slices of one of these parameters."""
    slices = trial.plan.slices
    for group in trial.plan.groups.get(axis, ()):
        for rank in group:
            if any(slices[rank].get(fqn) != slices[group[0]].get(fqn) for fqn in fqns):
                return True
    return False


def _changed_norm(norm: Callable[..., float], terms: Sequence[tuple[int, NumberOfStep]], rank: int, step: int) -> float:
    """Return the norm whose square has the squares of other norms added, each so many times.

    NaN if one is not finite; 0 if the square would be negative. terms: (times, norm by rank and step).
    """
    squares = [times * (other_norm(rank, step) or 0.0) ** 2 for times, other_norm in terms]
    if not all(map(math.isfinite, squares)):
        return math.nan
    added = math.fsum(squares)
    return math.sqrt(max(0.0, norm(rank, step) ** 2 + added))


def parameter_groupings(trial: Trial) -> dict[str, list[set[str]]]:
    """Return, by name of a grouping, the sets of fqns that may have a norm of their own."""
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


def recorded_norm(trial: Trial, rank: int, step: int, ranks: RankSets | None = None, **how: Any) -> float:
    """Return the norm of a step from the slices of `ranks[rank]`, by default of all ranks as this one sees them.

    how: further arguments of judge.norms.norm_of.
    """
    return observed.norm_of_slices(
        trial, step, ranks[rank] if ranks else observed.ranks_by_distance(trial, rank), **how
    )
