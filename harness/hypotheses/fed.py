"""Samples, labels or positions that ranks receive in place of the recipe's: which ones these are, and which ranks get
them.

Each row that a rank received is one of the recipe's samples, at some positions, or a sample of the data set, or nothing
known. The cause is read from that; the reference is then trained on what was received, and the checks judge.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from harness.core.causes.assume import assume_case, assume_features
from harness.core.causes.differences import GRADIENT_CHECKS
from harness.core.causes.factors import step_distance_text
from harness.core.causes.hypothesis import Broken, Hypothesis, not_tested_line
from harness.core.causes.words import on_ranks_text, rank_text
from harness.core.checks.samples import label_count_findings, wrong_labels
from harness.core.evidence.text import positions_text
from harness.core.judge.losses import global_loss
from harness.core.judge.places import first_stage_peer, representative_of_shares
from harness.core.judge.received_samples import (
    microbatches_of,
    received_positions_of,
    sample_id_by_row,
    samples_of_shares,
    samples_of_step,
    shared_samples,
    step_of_samples,
    wrong_microbatch_sizes,
)
from harness.core.judge.result import Cause, Lines
from harness.core.judge.trial import Trial
from harness.core.plan.stages import token_positions_of_rank
from harness.hypotheses.received import (
    Rows,
    are_labels_at_ends,
    are_validated_rows,
    assume_trained_on,
    first_token_of_rows,
    have_shared_rows,
    label_owner_text,
    label_positions_text,
    label_shift,
    right_labels,
    rows_of_dp_share,
    rows_of_step,
    wrong_positions,
)

if TYPE_CHECKING:
    from harness.reference.data import Dataset

OTHER_SEEDS = 8  # seeds and epochs beside the recipe's whose orders are tried
MOST_SAMPLES = 4096  # samples of a data set that are looked through
Shares = Mapping[int, list[int | None]]
"""Dp rank -> the ids of the samples that it received; None for rows that are none of the recipe's."""
CauseFinder = Callable[[Trial, int], Cause | None]
"""(trial, step) -> the cause that is seen in this step. None if it is not seen."""


def other_samples(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield the supposition that ranks received other samples, on which the reference is trained.

    Nothing unless `samples` is broken and a cause is seen. A second one divides losses of too few labels by the number
    requested. It is not judged again (assume is None) where tp peers differ, or where rows of some step are not known.
    """
    if "samples" not in broken or (cause := wrong_samples(trial)) is None:
        return
    by_step = _received_by_step(trial, trial.case.steps)
    label_shares = _label_ratios(trial, by_step)
    deviating_shares = label_shares if any(share != 1 for share in label_shares.values()) else {}
    explained_checks: tuple[str, ...] = ("samples",)
    if _is_divided_by_all(trial, deviating_shares):
        explained_checks += ("reported_loss",)
    if wrong_positions(trial) is None:
        explained_checks += ("positions",)
    if cause.kind == "odd traces":
        explained_checks += ("features",)
    lines: Lines = tuple(("samples", finding) for finding in broken["samples"].findings[:2])
    if cause.kind == "peers differ" and ("axis", "tp") in cause.details:
        reason = "tp peers compute parts of different samples, and no reference shows what follows"
        yield Hypothesis(cause, None, 1, (*lines, not_tested_line(reason)), (*explained_checks, *GRADIENT_CHECKS))
    elif cause.kind == "CP not applied":
        yield Hypothesis(cause, _assume_whole_sequences, 1, lines, explained_checks)
    elif cause.kind == "another load balance":
        balanced = not trial.case.features.cp_load_balance
        yield Hypothesis(cause, partial(assume_features, cp_load_balance=balanced), 2, lines, explained_checks)
    elif len(by_step) < len(trial.case.steps):
        yield Hypothesis(cause, None, 1, lines, explained_checks)
    else:
        given = ("samples",)
        yield Hypothesis(cause, lambda t: assume_trained_on(t, by_step), 1, lines, explained_checks, given_checks=given)
        if deviating_shares:
            yield Hypothesis(
                cause, lambda t: assume_trained_on(t, by_step, deviating_shares), 2, lines, given_checks=given
            )


def _assume_whole_sequences(trial: Trial) -> Trial:
    """Assume that there is no cp axis: its ranks are data-parallel ones, which receive the same samples."""
    case = trial.case
    cp = trial.case.dims.cp
    dims = replace(case.dims, cp=1, dp_shard=case.dims.dp_shard * cp)
    training = replace(case.training, global_batch=case.training.global_batch * cp)
    changed = assume_case(trial, replace(case, dims=dims, training=training))
    return assume_trained_on(changed, _received_by_step(changed, case.steps))


def _received_by_step(trial: Trial, steps: Iterable[int]) -> dict[int, Rows]:
    """Return, by step, the rows that all ranks received. A step is left out if the parts of its cp ranks do not make up
    rows.
    """
    return {step: rows for step in steps if (rows := rows_of_step(trial, step)) is not None}


def _label_ratios(trial: Trial, by_step: dict[int, Rows]) -> dict[int, float]:
    """Return, by step, the number of labels received that count, divided by the reference's."""
    valid_tokens = {step.step: step.valid_tokens for step in trial.reference.steps}
    return {step: int((rows.labels >= 0).sum()) / valid_tokens[step] for step, rows in by_step.items()}


def _is_divided_by_all(trial: Trial, label_shares: dict[int, float]) -> bool:
    """Return whether fewer losses than requested were summed, and the sum is reported as a mean over those requested.

    False without label shares.
    """
    means = {step: (global_loss(trial, step) or math.nan) * share for step, share in label_shares.items()}
    reported_losses = ((step.step, step.reported_loss) for _, step, _ in trial.steps_with_reference())
    matches = (
        loss and math.isclose(loss, means.get(step, math.nan), rel_tol=trial.bounds.loss[1])
        for step, loss in reported_losses
    )
    return bool(label_shares) and all(matches)


def wrong_samples(trial: Trial) -> Cause | None:
    """Return the first cause that is seen in the first step in which a rank receives something else than it should.

    None if all ranks receive the right samples.
    """
    cause_finders: tuple[CauseFinder, ...] = (
        _wrong_sequence_cut,
        _differing_peers,
        _shared_samples,
        _repeated_samples,
        _samples_of_other_steps,
        _wrong_microbatches,
        _wrong_labels_cause,
    )
    for step in trial.case.steps:
        for find_cause in cause_finders:
            if cause := find_cause(trial, step):
                return replace(cause, details=(("step", step), *cause.details))
    return None


def _step_text(trial: Trial, step: int) -> str:
    """Return a step in words, with a space before it. Empty for the first step of a run that does not resume."""
    text_of_first = " after resuming" if trial.case.resume else ""
    return text_of_first if step == trial.first_step else f" in step {step}"


# ---- where its rows stand in the sequence, and who should have the same


def _wrong_sequence_cut(trial: Trial, step: int) -> Cause | None:
    """Return the cause if samples are received at positions that are not those of the cp rank. None if none are."""
    case = trial.case
    ranks = samples_of_step(trial, step).by_rank
    length = trial.case.seq_len(step)
    received_positions = {rank: received_positions_of(trial, rank, step) for rank in ranks if case.dims.cp > 1}
    known = {rank: own for rank, own in received_positions.items() if own is not None}
    wrong_ranks = [
        rank for rank, own in known.items() if not np.array_equal(own, token_positions_of_rank(case, rank, length))
    ]
    if not wrong_ranks:
        return None
    first = wrong_ranks[0]
    received_text = positions_text(known[first])
    requested_text = positions_text(token_positions_of_rank(case, first, length))
    same_ranks = [rank for rank in wrong_ranks if np.array_equal(known[rank], known[first])]
    verb = "receives" if len(same_ranks) == 1 else "receive"
    hint = f"{rank_text(same_ranks)} {verb} the tokens at {received_text}{_step_text(trial, step)}, expected {requested_text}"
    if len(wrong_ranks) == len(ranks) and all(len(known[rank]) == length for rank in wrong_ranks):
        text = f"CP not applied: every cp rank receives whole sequences{_step_text(trial, step)}"
        return Cause("CP not applied", text, expected=f"cp {case.dims.cp}", details=(("cp", case.dims.cp),))
    balance = case.features.cp_load_balance
    changed_case = replace(case, features=replace(case.features, cp_load_balance=not balance))
    if all(np.array_equal(own, token_positions_of_rank(changed_case, rank, length)) for rank, own in known.items()):
        text = f"cp_load_balance {balance} is requested, {not balance} is observed"
        return Cause("another load balance", text, hint=hint, details=(("cp_load_balance", not balance),))
    return Cause("sequence cut otherwise", "cp ranks receive the wrong part of the sequence", hint=hint)


def _differing_peers(trial: Trial, step: int) -> Cause | None:
    """Return the cause if ranks receive other samples than the first of their tp or cp peers. None if all receive the same."""
    samples_by_rank = samples_of_step(trial, step).by_rank
    for axis in ("tp", "cp"):
        differing_ranks: list[int] = []
        for peers in trial.plan.groups.get(axis, ()):
            first = samples_by_rank.get(peers[0])
            differing_ranks += [rank for rank in peers if samples_by_rank.get(rank) != first]
        if differing_ranks:
            text = f"{axis} peers receive different samples{_step_text(trial, step)}"
            hint = f"{rank_text(differing_ranks)} unlike their first peer"
            return Cause("peers differ", text, hint=hint, details=(("axis", axis), ("ranks", tuple(differing_ranks))))
    return None


# ---- who shares samples with whom, and what comes twice


def _shared_samples(trial: Trial, step: int) -> Cause | None:
    """Return the cause if two dp ranks receive the same sample. None if none do."""
    samples = samples_of_shares(trial, step)
    shares = samples.by_rank
    when = _step_text(trial, step)
    if groups := samples.ranks_alike:
        text = f"{' and '.join(map(rank_text, groups))} received the same samples{when}"
        return Cause("same samples", text, details=(("ranks", groups[0]), ("all", tuple(groups))))
    for pair in itertools.combinations(shares, 2):
        if shared_samples({*shares[rank]} - {None} for rank in pair):
            text = f"dp ranks draw overlapping samples{when}: some are received more than once"
            return Cause("samples overlap", text, details=(("ranks", pair),))
    return None


def _repeated_samples(trial: Trial, step: int) -> Cause | None:
    """Return the cause if a rank receives a sample twice. None if none does.

    If all samples of a microbatch come twice, or all of its tokens, the cause has the numbers of the microbatches.
    """
    samples = samples_of_shares(trial, step)
    shares = samples.by_rank
    repeating_ranks = [rank for rank, ids in shares.items() if None not in ids and len({*ids}) < len(ids)]
    if not repeating_ranks:
        return None
    pairs = samples.repeated_microbatches(repeating_ranks[0])
    if not pairs:
        verb = "receives" if len(repeating_ranks) == 1 else "receive"
        text = f"{rank_text(repeating_ranks)} {verb} samples more than once{_step_text(trial, step)}"
        return Cause("samples overlap", text, details=(("ranks", tuple(repeating_ranks)),))
    ranks = [rank for rank in repeating_ranks if samples.repeated_microbatches(rank) == pairs]
    later_microbatches = tuple(number for _, number in pairs)
    passes = microbatches_of(trial, repeating_ranks[0], step)
    numbers_text = positions_text(np.array(sorted({*pairs[0], *later_microbatches})))
    text = f"in step {step} microbatches {numbers_text} have the same tokens"
    details = (("microbatches", later_microbatches), ("ranks", tuple(ranks)))
    without_loss = {number for number, part in enumerate(passes, 1) if part.loss_sum is None}
    if {*later_microbatches} == without_loss and not samples.missing:
        text = (
            f"the model runs outside training passes: {text}, no loss of {positions_text(np.array(later_microbatches))}"
        )
        return Cause("odd traces", text, on_ranks_text(trial, ranks).strip(), details=details)
    return Cause("microbatches repeated", text, on_ranks_text(trial, ranks).strip(), details=details)


# ---- samples of other steps, of the data set, or of nothing known


def _samples_of_other_steps(trial: Trial, step: int) -> Cause | None:
    """Return the cause if ranks receive samples that are not the step's, or if no rank receives some of the step's.

    None if all ranks together receive the step's samples.
    """
    samples = samples_of_shares(trial, step)
    shares = samples.by_rank
    wanted = {*samples.requested}
    when = _step_text(trial, step)
    wrong_ranks = tuple(samples.ranks_with_others)
    if not wrong_ranks:
        missing = samples.missing
        if not missing:
            return None
        text = f"{len(missing)} of {len(wanted)} samples of step {step} are received by no rank in this step"
        return Cause("samples lost", text, details=(("samples", tuple(sorted(missing))),))
    steps = tuple(step_of_samples(trial, shares[rank]) for rank in wrong_ranks)
    where = on_ranks_text(trial, wrong_ranks).strip()
    if None not in steps and len({*steps}) == 1:
        text = f"step {step} receives the samples of step {steps[0]}"
        if trial.case.resume:
            text += when
        hint = step_distance_text(trial, step, steps[0] or step)
        return Cause("data position", text, where, hint=hint, details=(("of_step", steps[0]), ("ranks", wrong_ranks)))
    unknown = any(None in shares[rank] for rank in wrong_ranks)
    if unknown and are_validated_rows(trial, step, wrong_ranks):
        text = f"rows received{when}{on_ranks_text(trial, wrong_ranks)} are those that are validated on"
        return Cause("samples of no step", text, details=(("ranks", wrong_ranks), ("validated", True)))
    if dealing := _observed_dealing(trial, step, wrong_ranks):
        order_text, begin, is_usual = dealing
        if is_usual:
            own = (step - 1) * len(wanted) // len(shares)
            text = f"the data position is wrong{when}: it reads on at its share's sample {begin}, not {own}"
            return Cause("data position", text, where, details=(("begins", begin), ("ranks", wrong_ranks)))
        kind = "samples of no step" if unknown else "samples dealt otherwise"
        return Cause(kind, order_text, when.strip(), details=(("ranks", wrong_ranks), ("order", order_text)))
    if unknown and have_shared_rows(trial):
        text = f"dp ranks draw overlapping samples{when}: some rows are received by two of them in these steps"
        return Cause("samples overlap", text, details=(("ranks", wrong_ranks),))
    if unknown:
        return _unknown_samples(trial, step, wrong_ranks)
    received_ids = itertools.chain.from_iterable(shares[rank] for rank in wrong_ranks)
    foreign_ids = [id_ for id_ in received_ids if id_ not in wanted]
    others = tuple(number for number, ids in enumerate(trial.reference.samples, 1) if {*ids} & {*foreign_ids})
    steps_text = ", ".join(map(str, others))
    total = sum(map(len, shares.values()))
    text = f"{len(foreign_ids)} of {total} samples received in step {step} are those of step {steps_text}"
    hint = ""
    if total > len(wanted):
        hint = f"{total - len(wanted)} too many"
    return Cause("data position", text, where, hint=hint, details=(("of_step", others), ("ranks", wrong_ranks)))


def _unknown_samples(trial: Trial, step: int, wrong_ranks: tuple[int, ...]) -> Cause:
    """Return the cause if some rows of these ranks are no samples of the recipe's."""
    first_token = first_token_of_rows(trial, step, wrong_ranks)
    received_text = f"rows received{_step_text(trial, step)}{on_ranks_text(trial, wrong_ranks)} are"
    ids: list[int | None] = []
    shares = samples_of_shares(trial, step).by_rank
    for rank in wrong_ranks:
        ids += shares[rank]
    count_text = f"{ids.count(None)} of {len(ids)} " if any(id_ is not None for id_ in ids) else ""
    text = f"{count_text}{received_text} none of the recipe's {len(trial.reference.samples)} steps"
    if first_token:
        text = f"{received_text} the step's samples from token {first_token} on (counted from 0)"
    return Cause("samples of no step", text, details=(("ranks", wrong_ranks), ("from_token", first_token)))


def _load_data_set(trial: Trial) -> Dataset | None:
    """Return the data set of the recipe's samples. None if it cannot be read, has other samples, or is larger than
    MOST_SAMPLES. Imports torch.
    """
    from harness.reference.data import build_dataset

    try:
        data = build_dataset(trial.case.training, trial.case.model)
    except ValueError:
        return None
    ids = trial.reference.sample_ids
    tokens = trial.reference.tokens
    is_same = len(data) <= MOST_SAMPLES and all(
        np.array_equal(data[id_][0], tokens[row]) for row, id_ in enumerate(ids)
    )
    return data if is_same else None


def _observed_dealing(trial: Trial, step: int, ranks: tuple[int, ...]) -> tuple[str, int, bool] | None:
    """Return (how samples were dealt to these dp ranks, in words; sample of a share at which they read on; is it usual).

    None if no order that is tried fits, or the data set cannot be read.
    """
    rows = {rank: rows_of_dp_share(trial, rank, step) for rank in ranks}
    if None in rows.values() or (data := _load_data_set(trial)) is None:
        return None
    length = trial.case.seq_len(step)
    index = sample_id_by_row(data, length)
    sample_ids = {}
    for rank, rows_of_share in rows.items():
        if rows_of_share:
            sample_ids[rank] = [index.get(row.tobytes()) for row in rows_of_share.tokens]
    samples_per_step = trial.case.training.global_batch // len(representative_of_shares(trial))
    for text, is_usual, share_of in _possible_dealings(trial, len(data)):
        begins = set()
        for rank, ids in sample_ids.items():
            share = share_of(representative_of_shares(trial).index(rank))
            starts = (start for start in range(len(share)) if share[start : start + len(ids)] == ids)
            begins.add(next(starts, None))
        begin = begins.pop()
        if not begins and begin is not None and (is_usual or begin == (step - 1) * samples_per_step):
            return text, begin, is_usual
    return None


def _possible_dealings(trial: Trial, size: int) -> Iterator[tuple[str, bool, Callable[[int], list[int]]]]:
    """Yield (order of samples in words, is it the usual one, share number -> sample ids of this share in an epoch)."""
    from harness.reference.data import sample_order

    training = trial.case.training
    count = len(representative_of_shares(trial))
    usual = sample_order(training, size, 0)
    block = size // count
    seed = training.seed
    yield "as requested", True, lambda share: usual[share::count]
    yield "samples come in the data set's own order, not shuffled", False, lambda share: [*range(size)][share::count]
    text = "each dp rank reads a block of the shuffled samples"
    yield text, False, lambda share: usual[share * block : (share + 1) * block]
    products = {1}
    for degree in trial.case.dims.degrees:
        products |= {degree * product for product in products}
    for stride in sorted(products - {1, count}):
        text = f"each dp rank reads one of {stride} shuffled samples, requested one of {count}"
        yield text, False, lambda share, stride=stride: usual[share::stride]  # type: ignore[misc]
    for other in (*range(seed + 1, seed + OTHER_SEEDS), *range(seed - OTHER_SEEDS, seed), 0):
        order = sample_order(training, size, other - seed)
        yield f"samples come in the order of seed {other}", False, lambda share, order=order: order[share::count]  # type: ignore[misc]


def _wrong_microbatches(trial: Trial, step: int) -> Cause | None:
    """Return the cause if ranks run microbatches of other sizes than requested. None if all sizes are right."""
    ranks_by_sizes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for rank, sizes in wrong_microbatch_sizes(trial, step).items():
        ranks_by_sizes.setdefault(sizes, []).append(rank)
    if not ranks_by_sizes:
        return None
    texts = [
        f"{rank_text(ranks)} ran microbatches of {[*sizes]} samples" for (sizes, _), ranks in ranks_by_sizes.items()
    ]
    expected = " or ".join(dict.fromkeys(f"{[*wanted]}" for _, wanted in ranks_by_sizes))
    ranks = sorted(itertools.chain(*ranks_by_sizes.values()))
    first_sizes, _ = next(iter(ranks_by_sizes))
    text = f"accumulation: {' and '.join(texts)} in step {step}"
    details = (("ranks", tuple(ranks)), ("sizes", first_sizes))
    return Cause("microbatches", text, expected=expected, details=details)


# ---- labels


def _wrong_labels_cause(trial: Trial, step: int) -> Cause | None:
    """Return the cause if labels are not those of the samples received. None if all are.

    They may be shifted, wrongly masked, of other samples, too few or too many.
    """
    wrong = {rank: labels for rank, labels in wrong_labels(trial, step).items() if labels}
    misshapen = label_count_findings(trial, step)
    if not wrong and not misshapen:
        return None
    rows = rows_of_step(trial, step)
    if rows is not None and (shift := label_shift(trial, step, rows)):
        text = f"labels are shifted by {shift + 1} tokens, not by 1"
        return Cause("labels shifted", text, details=(("by", shift),))
    if not wrong:
        return Cause("labels lost", "the loss is computed from too few or too many labels", finding=misshapen[0])
    labels = []
    for rank in wrong:
        first_peer = trial.plan.peers(rank, "tp")[0]
        if first_peer not in wrong or first_peer == rank:  # the labels of a tp group are the same ones
            labels += wrong[rank]
    hint = _wrong_labels_text(trial, step, wrong, rows)
    text = f"{len(labels)} labels{on_ranks_text(trial, wrong)} in step {step} are not those of the tokens"
    return Cause("wrong labels", text, hint=hint, details=(("ranks", tuple(wrong)), ("labels", hint)))


def _wrong_labels_text(
    trial: Trial, step: int, wrong: Mapping[int, list[tuple[int, int, int]]], rows: Rows | None
) -> str:
    """Return in words what wrong labels have in common; empty if nothing is known. wrong: rank -> (position, label, right)."""
    labels = [*itertools.chain.from_iterable(wrong.values())]
    all_masked = all(label < 0 for _, label, _ in labels)
    if are_labels_at_ends(trial, step, wrong):
        return "each is the last of a cp rank's part" + (", and masked" if all_masked else "")
    if untrained := _untrained_numbers(trial, step, tuple(wrong)):
        noun = "microbatches" if len(untrained) > 1 else "microbatch"
        return f"none of {noun} {positions_text(np.array(untrained))} is trained on"
    if all_masked:
        tokens = {right for _, _, right in labels}
        if len(tokens) == 1 < len(labels):
            return f"masked, but should be trained on; each is token {min(tokens)}"
        return "masked, but should be trained on"
    if all(right < 0 for _, _, right in labels):
        return "trained on, but should be masked"
    if rows is not None and rows.is_one_label_a_token:
        return label_positions_text(trial, step, rows) or label_owner_text(trial, rows)
    return ""


def _untrained_numbers(trial: Trial, step: int, ranks: tuple[int, ...]) -> list[int]:
    """Return the numbers, from 1, of these ranks' microbatches that should have labels that count and have none.

    Empty if labels of other microbatches are wrong too, or lie in another way than the right ones, as under cp.
    """
    untrained_microbatches: set[int] = set()
    for rank in ranks:
        parts_of_feeder = microbatches_of(trial, first_stage_peer(trial, rank), step)
        tokens_of_parts = [part.tokens for part in parts_of_feeder if part.tokens is not None]
        labels_of_parts = [part.labels for part in microbatches_of(trial, rank, step) if part.labels is not None]
        for number, (tokens, labels) in enumerate(zip(tokens_of_parts, labels_of_parts, strict=False), 1):
            own = right_labels(trial, tokens) if trial.case.dims.cp == 1 else np.empty(0)
            if own.size != labels.size:
                return []
            if (own >= 0).any() and not (labels >= 0).any():
                untrained_microbatches.add(number)
            elif (labels.ravel() != own.ravel()).any():
                return []
    return sorted(untrained_microbatches)
