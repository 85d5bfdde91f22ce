"""Ranks are fed other samples, labels or positions than the recipe says: which ones these are, and who gets them.

Each row that a rank received is one of the recipe's samples, at some positions, or a sample of the data set, or nothing known.
The cause is read from that; the reference is then trained on what was received, and the checks judge.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from harness.core.causes.assume import another_case, another_feature
from harness.core.causes.differences import OF_GRADIENTS
from harness.core.causes.factors import how_far
from harness.core.causes.hypothesis import Broken, Hypothesis, no_reference
from harness.core.causes.words import on_ranks, rank_words
from harness.core.checks.resume import step_received
from harness.core.checks.samples import misshapen_labels, parts_of, wrong_labels
from harness.core.evidence.text import positions_text
from harness.core.judge.losses import global_loss
from harness.core.judge.places import feeder_of, one_rank_per_share
from harness.core.judge.received_samples import positions_received, received_samples, shares_of_samples, sizes_wanted
from harness.core.judge.result import Cause, Lines
from harness.core.judge.trial import Trial
from harness.core.plan.stages import positions
from harness.hypotheses.received import (
    Rows,
    at_the_ends,
    of_other_positions,
    of_share,
    own_labels,
    parts_of_samples,
    received,
    share_rows,
    shifted,
    trained_on,
    validated_rows,
    whose_labels,
    wrong_positions,
)

if TYPE_CHECKING:
    from harness.reference.data import Dataset

ORDERS = 8  # seeds and epochs beside the recipe's whose orders are tried
MOST = 4096  # samples of a data set that are looked through
Shares = Mapping[int, list[int | None]]
"""Dp rank -> the ids of the samples that it received; None for rows that are none of the recipe's."""
Look = Callable[[Trial, int], Cause | None]
"""At one step."""


def other_samples(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """The reference is trained on what was received; labels that are too few may be divided by the number requested."""
    if "samples" not in broken or (cause := wrong_samples(trial)) is None:
        return
    by_step = {step: rows for step in trial.case.steps if (rows := received(trial, step)) is not None}
    counted = _counted(trial, by_step)
    share = counted if any(part != 1 for part in counted.values()) else {}
    seen = ("samples", *["reported_loss"] * _divided_by_all(trial, share))
    seen += ("positions",) * (wrong_positions(trial) is None) + ("features",) * (cause.kind == "odd traces")
    lines: Lines = tuple(("samples", one) for one in broken["samples"].findings[:2])
    if cause.kind == "peers differ" and ("axis", "tp") in cause.details:
        what = "tp peers compute parts of different samples, and no reference shows what follows"
        yield Hypothesis(cause, None, 1, (*lines, no_reference(what)), (*seen, *OF_GRADIENTS))
    elif cause.kind == "CP not applied":
        yield Hypothesis(cause, _whole_sequences, 1, lines, seen)
    elif cause.kind == "another load balance":
        other = not trial.case.features.cp_load_balance
        yield Hypothesis(cause, partial(another_feature, cp_load_balance=other), 2, lines, seen)
    elif len(by_step) < len(trial.case.steps):
        yield Hypothesis(cause, None, 1, lines, seen)
    else:
        given = ("samples",)
        yield Hypothesis(cause, lambda t: trained_on(t, by_step), 1, lines, seen, given=given)
        if share:
            yield Hypothesis(cause, lambda t: trained_on(t, by_step, share), 2, lines, given=given)


def _whole_sequences(trial: Trial) -> Trial:
    """Assume that there is no cp axis: its ranks are data parallel ones, which receive the same samples."""
    case, cp = trial.case, trial.case.dims.cp
    dims = replace(case.dims, cp=1, dp_shard=case.dims.dp_shard * cp)
    training = replace(case.training, global_batch=case.training.global_batch * cp)
    changed = another_case(trial, replace(case, dims=dims, training=training))
    return trained_on(changed, {step: rows for step in case.steps if (rows := received(changed, step)) is not None})


def _counted(trial: Trial, by_step: dict[int, Rows]) -> dict[int, float]:
    """Return the share of a step's labels that it has."""
    wanted = {step.step: step.valid_tokens for step in trial.reference.steps}
    return {step: int((rows.labels >= 0).sum()) / wanted[step] for step, rows in by_step.items()}


def _divided_by_all(trial: Trial, share: dict[int, float]) -> bool:
    """Whether fewer losses than are requested were summed, and the sum is reported as a mean over those requested."""
    means = {step: (global_loss(trial, step) or math.nan) * by for step, by in share.items()}
    shown = ((step.step, step.reported_loss) for _, step, _ in trial.steps())
    alike = (
        loss and math.isclose(loss, means.get(step, math.nan), rel_tol=trial.bounds.loss[1]) for step, loss in shown
    )
    return bool(share) and all(alike)


def wrong_samples(trial: Trial) -> Cause | None:
    """Named by the first step in which a rank receives something else than it should."""
    looks: tuple[Look, ...] = (_cut_otherwise, _differing_peers, _shared, _repeated, _foreign, _microbatches, _labels)
    found = ((step, cause) for step in trial.case.steps for look in looks if (cause := look(trial, step)))
    step, cause = next(found, (0, None))
    return cause and replace(cause, details=(("step", step), *cause.details))


def _when(trial: Trial, step: int) -> str:
    first = " after resuming" if trial.case.resume else ""
    return first if step == trial.first_step else f" in step {step}"


# ---- where its rows stand in the sequence, and who should have the same


def _cut_otherwise(trial: Trial, step: int) -> Cause | None:
    """Samples that are right, at positions that are not those of the cp rank."""
    case, ranks, length = trial.case, received_samples(trial, step), trial.case.seq_len(step)
    at = {rank: positions_received(trial, rank, step) for rank in ranks if case.dims.cp > 1}
    known = {rank: own for rank, own in at.items() if own is not None}
    odd = [rank for rank, own in known.items() if not np.array_equal(own, positions(case, rank, length))]
    if not odd:
        return None
    cut, wanted = (positions_text(of) for of in (known[odd[0]], positions(case, odd[0], length)))
    alike = [rank for rank in odd if np.array_equal(known[rank], known[odd[0]])]
    hint = f"{rank_words(alike)} receive{'s' * (len(alike) == 1)} the tokens at {cut}{_when(trial, step)}, expected {wanted}"
    if len(odd) == len(ranks) and all(len(known[rank]) == length for rank in odd):
        text = f"CP not applied: every cp rank receives whole sequences{_when(trial, step)}"
        return Cause("CP not applied", text, expected=f"cp {case.dims.cp}", details=(("cp", case.dims.cp),))
    balance = case.features.cp_load_balance
    other = replace(case, features=replace(case.features, cp_load_balance=not balance))
    if all(np.array_equal(own, positions(other, rank, length)) for rank, own in known.items()):
        text = f"cp_load_balance {balance} is requested, {not balance} is observed"
        return Cause("another load balance", text, hint=hint, details=(("cp_load_balance", not balance),))
    return Cause("sequence cut otherwise", "cp ranks receive the wrong part of the sequence", hint=hint)


def _differing_peers(trial: Trial, step: int) -> Cause | None:
    ranks = received_samples(trial, step)
    for axis in ("tp", "cp"):
        groups = trial.plan.groups.get(axis, ())
        if odd := tuple(rank for peers in groups for rank in peers if ranks.get(rank) != ranks.get(peers[0])):
            text, details = (
                f"{axis} peers receive different samples{_when(trial, step)}",
                (("axis", axis), ("ranks", odd)),
            )
            return Cause("peers differ", text, hint=f"{rank_words(odd)} unlike their first peer", details=details)
    return None


# ---- who shares samples with whom, and what comes twice


def _shared(trial: Trial, step: int) -> Cause | None:
    shares, when = shares_of_samples(trial, step), _when(trial, step)
    alike: dict[tuple[int | None, ...], list[int]] = {}
    for rank, ids in shares.items():
        alike.setdefault(tuple(ids), []).append(rank)
    if same := [tuple(ranks) for ids, ranks in alike.items() if None not in ids and len(ranks) > 1]:
        text = f"{' and '.join(map(rank_words, same))} received the same samples{when}"
        return Cause("same samples", text, details=(("ranks", same[0]), ("all", tuple(same))))
    for pair in itertools.combinations(shares, 2):
        if (set(shares[pair[0]]) & set(shares[pair[1]])) - {None}:
            text = f"dp ranks draw overlapping samples{when}: some are received more than once"
            return Cause("samples overlap", text, details=(("ranks", pair),))
    return None


def _repeated(trial: Trial, step: int) -> Cause | None:
    """A rank receives a sample twice: where it is all of a microbatch, or of its tokens, which ones."""
    shares = shares_of_samples(trial, step)
    twice = [rank for rank, ids in shares.items() if None not in ids and len({*ids}) < len(ids)]
    if not twice:
        return None
    again = _repeated_microbatches(trial, twice[0], step)
    if not again:
        text = f"{rank_words(twice)} receive{'s' * (len(twice) == 1)} samples more than once{_when(trial, step)}"
        return Cause("samples overlap", text, details=(("ranks", tuple(twice)),))
    ranks = [rank for rank in twice if _repeated_microbatches(trial, rank, step) == again]
    late, passes = tuple(number for _, number in again), parts_of(trial, twice[0], step)
    text = f"in step {step} microbatches {positions_text(np.array(sorted({*again[0], *late})))} have the same tokens"
    details = (("microbatches", late), ("ranks", tuple(ranks)))
    unseen = {number for number, part in enumerate(passes, 1) if part.loss_sum is None}
    if {*late} == unseen and {*trial.reference.samples[step - 1]} <= {*itertools.chain(*shares.values())}:
        text = f"the model runs outside training passes: {text}, no loss of {positions_text(np.array(late))}"
        return Cause("odd traces", text, on_ranks(trial, ranks).strip(), details=details)
    return Cause("microbatches repeated", text, on_ranks(trial, ranks).strip(), details=details)


def _repeated_microbatches(trial: Trial, rank: int, step: int) -> list[tuple[int, int]]:
    """(an earlier microbatch of a rank, a later one that holds the same samples). Counted from 1."""
    fed = (part.tokens for part in parts_of(trial, rank, step))
    rows = [sorted(row.tobytes() for row in tokens) for tokens in fed if tokens is not None]
    return [(rows.index(own) + 1, late) for late, own in enumerate(rows, 1) if rows.index(own) + 1 < late]


# ---- samples of other steps, of the data set, or of nothing known


def _foreign(trial: Trial, step: int) -> Cause | None:
    """Samples that are not the step's; if there are none, samples of the step that no rank received."""
    shares, wanted, when = shares_of_samples(trial, step), {*trial.reference.samples[step - 1]}, _when(trial, step)
    odd = tuple(rank for rank, ids in shares.items() if {*ids} - wanted)
    if not odd:
        missing = wanted.difference(*shares.values())
        text = f"{len(missing)} of {len(wanted)} samples of step {step} are received by no rank in this step"
        return Cause("samples lost", text, details=(("samples", tuple(sorted(missing))),)) if missing else None
    steps, where = tuple(step_received(trial, shares[rank]) for rank in odd), on_ranks(trial, odd).strip()
    if None not in steps and len({*steps}) == 1:
        text = f"step {step} receives the samples of step {steps[0]}{when * bool(trial.case.resume)}"
        hint = how_far(trial, step, steps[0] or step)
        return Cause("data position", text, where, hint=hint, details=(("of_step", steps[0]), ("ranks", odd)))
    unknown = any(None in shares[rank] for rank in odd)
    if unknown and validated_rows(trial, step, odd):
        text = f"rows received{when}{on_ranks(trial, odd)} are those that are validated on"
        return Cause("samples of no step", text, details=(("ranks", odd), ("validated", True)))
    if found := _dealt(trial, step, odd):
        how, begun, usual = found
        if usual:
            own = (step - 1) * len(wanted) // len(shares)
            text = f"the data position is wrong{when}: it reads on at its share's sample {begun}, not {own}"
            return Cause("data position", text, where, details=(("begins", begun), ("ranks", odd)))
        kind = "samples of no step" if unknown else "samples dealt otherwise"
        return Cause(kind, how, when.strip(), details=(("ranks", odd), ("order", how)))
    if unknown and share_rows(trial):
        text = f"dp ranks draw overlapping samples{when}: some rows are received by two of them in these steps"
        return Cause("samples overlap", text, details=(("ranks", odd),))
    if unknown:
        return _of_no_step(trial, step, odd)
    known = [id_ for rank in odd for id_ in shares[rank] if id_ not in wanted]
    others = tuple(n for n, ids in enumerate(trial.reference.samples, 1) if {*ids} & {*known})
    of = ", ".join(map(str, others))
    total = sum(map(len, shares.values()))
    text = f"{len(known)} of {total} samples received in step {step} are those of step {of}"
    hint = f"{total - len(wanted)} too many" * (total > len(wanted))
    return Cause("data position", text, where, hint=hint, details=(("of_step", others), ("ranks", odd)))


def _of_no_step(trial: Trial, step: int, odd: tuple[int, ...]) -> Cause:
    """Some rows of these ranks are no samples of the recipe's."""
    by, received = parts_of_samples(trial, step, odd), f"rows received{_when(trial, step)}{on_ranks(trial, odd)} are"
    rows = [one for rank in odd for one in shares_of_samples(trial, step)[rank]]
    some = f"{rows.count(None)} of {len(rows)} " if any(one is not None for one in rows) else ""
    text = f"{some}{received} none of the recipe's {len(trial.reference.samples)} steps"
    if by:
        text = f"{received} the step's samples from token {by} on (counted from 0)"
    return Cause("samples of no step", text, details=(("ranks", odd), ("from_token", by)))


def _data_of(trial: Trial) -> Dataset | None:
    """None where it is not there any more, or is no longer the one that the recipe's samples are of."""
    from harness.reference.data import build_dataset

    try:
        data = build_dataset(trial.case.training, trial.case.model)
    except ValueError:
        return None
    ids, tokens = trial.reference.sample_ids, trial.reference.tokens
    same = len(data) <= MOST and all(np.array_equal(data[id_][0], tokens[at]) for at, id_ in enumerate(ids))
    return data if same else None


def _dealt(trial: Trial, step: int, ranks: tuple[int, ...]) -> tuple[str, int, bool] | None:
    """Return how the data set's samples were ordered and dealt to these dp ranks, where in its share each reads on, and
    whether that is the usual way."""
    rows = {rank: of_share(trial, rank, step) for rank in ranks}
    if None in rows.values() or (data := _data_of(trial)) is None:
        return None
    length = trial.case.seq_len(step)
    index = {data[at][0][:length].numpy().tobytes(): at for at in range(len(data))}
    drawn = {rank: [index.get(row.tobytes()) for row in own.tokens] for rank, own in rows.items() if own}
    own = trial.case.training.global_batch // len(one_rank_per_share(trial))
    for text, usual, deal in _deals(trial, len(data)):
        begun = set()
        for rank, ids in drawn.items():
            share = deal(one_rank_per_share(trial).index(rank))
            starts = (at for at in range(len(share)) if share[at : at + len(ids)] == ids)
            begun.add(next(starts, None))
        place = begun.pop()
        if not begun and place is not None and (usual or place == (step - 1) * own):
            return text, place, usual
    return None


def _deals(trial: Trial, size: int) -> Iterator[tuple[str, bool, Callable[[int], list[int]]]]:
    """What each share of an epoch is: the order of the data set's samples, whether it is the usual one, and how it is cut."""
    from harness.reference.data import sample_order

    training, count = trial.case.training, len(one_rank_per_share(trial))
    usual, block, seed = sample_order(training, size, 0), size // count, training.seed
    yield "as requested", True, lambda share: usual[share::count]
    yield "samples come in the data set's own order, not shuffled", False, lambda share: [*range(size)][share::count]
    text = "each dp rank reads a block of the shuffled samples"
    yield text, False, lambda share: usual[share * block : (share + 1) * block]
    products = {1}
    for degree in trial.case.dims.degrees:
        products |= {degree * product for product in products}
    for stride in sorted(products - {1, count}):
        text = f"each dp rank reads one of {stride} shuffled samples, requested one of {count}"
        yield text, False, lambda share, by=stride: usual[share::by]  # type: ignore[misc]
    for other in (*range(seed + 1, seed + ORDERS), *range(seed - ORDERS, seed), 0):
        order = sample_order(training, size, other - seed)
        yield f"samples come in the order of seed {other}", False, lambda share, order=order: order[share::count]  # type: ignore[misc]


def _microbatches(trial: Trial, step: int) -> Cause | None:
    odd: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for rank in received_samples(trial, step):
        sizes = tuple(len(part.tokens) for part in parts_of(trial, rank, step) if part.tokens is not None)
        if sizes != (wanted := tuple(sizes_wanted(trial, rank, step))):
            odd.setdefault((sizes, wanted), []).append(rank)
    if not odd:
        return None
    texts = [f"{rank_words(ranks)} ran microbatches of {[*sizes]} samples" for (sizes, _), ranks in odd.items()]
    expected = " or ".join(dict.fromkeys(f"{[*wanted]}" for _, wanted in odd))
    details = (("ranks", tuple(sorted(itertools.chain(*odd.values())))), ("sizes", next(iter(odd))[0]))
    return Cause(
        "microbatches", f"accumulation: {' and '.join(texts)} in step {step}", expected=expected, details=details
    )


# ---- labels


def _labels(trial: Trial, step: int) -> Cause | None:
    """Labels that are not those of the samples received: shifted, wrongly masked, of other samples, too few or too many."""
    wrong = {rank: labels for rank, labels in wrong_labels(trial, step).items() if labels}
    lost = misshapen_labels(trial, step)
    if not wrong and not lost:
        return None
    rows = received(trial, step)
    if rows is not None and (by := shifted(trial, step, rows)):
        text = f"labels are shifted by {by + 1} tokens, not by 1"
        return Cause("labels shifted", text, details=(("by", by),))
    if not wrong:
        return Cause("labels lost", "the loss is computed from too few or too many labels", finding=lost[0])
    once = [
        rank
        for rank in wrong
        if trial.plan.peers(rank, "tp")[0] not in wrong or trial.plan.peers(rank, "tp")[0] == rank
    ]
    labels = [label for rank in once for label in wrong[rank]]  # those of a tp group are the same ones
    hint = _labels_words(trial, step, wrong, rows)
    text = f"{len(labels)} labels{on_ranks(trial, wrong)} in step {step} are not those of the tokens"
    return Cause("wrong labels", text, hint=hint, details=(("ranks", tuple(wrong)), ("labels", hint)))


def _labels_words(trial: Trial, step: int, wrong: Mapping[int, list[tuple[int, int, int]]], rows: Rows | None) -> str:
    labels = [label for of_rank in wrong.values() for label in of_rank]
    masked = all(label < 0 for _, label, _ in labels)
    if at_the_ends(trial, step, wrong):
        return "each is the last of a cp rank's part" + ", and masked" * masked
    if lost := _untrained(trial, step, tuple(wrong)):
        return f"none of microbatch{'es' * (len(lost) > 1)} {positions_text(np.array(lost))} is trained on"
    if masked:
        tokens = {own for _, _, own in labels}
        same = f"; each is token {min(tokens)}" * (len(tokens) == 1 < len(labels))
        return f"masked, but should be trained on{same}"
    if all(own < 0 for _, _, own in labels):
        return "trained on, but should be masked"
    if rows is not None and rows.whole:
        return of_other_positions(trial, step, rows) or whose_labels(trial, rows)
    return ""


def _untrained(trial: Trial, step: int, ranks: tuple[int, ...]) -> list[int]:
    """The microbatches of these ranks that have labels of which none counts, where all that are wrong are of such; from 1."""
    found: set[int] = set()
    for rank in ranks:
        fed = [part.tokens for part in parts_of(trial, feeder_of(trial, rank), step) if part.tokens is not None]
        seen = [part.labels for part in parts_of(trial, rank, step) if part.labels is not None]
        for number, (tokens, labels) in enumerate(zip(fed, seen, strict=False), 1):
            own = own_labels(trial, tokens) if trial.case.dims.cp == 1 else np.empty(0)
            if own.size != labels.size:
                return []
            if (own >= 0).any() and not (labels >= 0).any():
                found.add(number)
            elif (labels.ravel() != own.ravel()).any():
                return []
    return sorted(found)
