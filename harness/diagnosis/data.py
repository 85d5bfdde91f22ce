"""Ranks receive other samples or labels than the recipe says: what is special about them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from harness.checks.resume import step_received
from harness.checks.samples import parts_of
from harness.diagnosis.assume import another_case, another_feature
from harness.diagnosis.differences import OF_GRADIENTS
from harness.diagnosis.hypothesis import Broken, Hypothesis, no_reference
from harness.diagnosis.labels import lost_labels, mismatched_labels
from harness.diagnosis.positions import wrong_positions
from harness.diagnosis.received import (
    Rows,
    labelled_otherwise,
    received,
    repeated_microbatches,
    trained_on,
)
from harness.diagnosis.unknown_rows import begun_elsewhere, dealt_otherwise, described, further_ahead
from harness.diagnosis.words import on_ranks, rank_words
from harness.evidence.text import positions_text
from harness.judge.losses import global_loss
from harness.judge.received_samples import positions_received, received_samples, rows_received, shares_of_samples
from harness.judge.result import Cause, Lines
from harness.judge.trial import Trial
from harness.plan.stages import positions


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
    if cause.kind == "peers differ" and "tp" in cause.observed:
        what = "tp peers compute parts of different samples, and no reference tells what follows"
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
    """As if there were no cp axis: its ranks are data parallel ones, which receive the same samples."""
    case, cp = trial.case, trial.case.dims.cp
    dims = replace(case.dims, cp=1, dp_shard=case.dims.dp_shard * cp)
    training = replace(case.training, global_batch=case.training.global_batch * cp)
    changed = another_case(trial, replace(case, dims=dims, training=training))
    return trained_on(changed, {step: rows for step in case.steps if (rows := received(changed, step)) is not None})


def _counted(trial: Trial, by_step: dict[int, Rows]) -> dict[int, float]:
    """Of the labels that a step should have, those that it has."""
    wanted = {step.step: step.valid_tokens for step in trial.reference.steps}
    return {step: int((rows.labels >= 0).sum()) / wanted[step] for step, rows in by_step.items()}


def _divided_by_all(trial: Trial, share: dict[int, float]) -> bool:
    """Whether fewer losses than are requested were summed, and the sum is reported as a mean over those requested."""
    means = {step: (global_loss(trial, step) or math.nan) * by for step, by in share.items()}
    shown = ((step.step, step.reported_loss) for _, step, _ in trial.steps())
    alike = (loss and math.isclose(loss, means[step], rel_tol=trial.bounds.loss[1]) for step, loss in shown)
    return bool(share) and all(alike)


# ---- what is special about them


def wrong_samples(trial: Trial) -> Cause | None:
    """Named by the first step in which a rank receives something else than it should."""
    names: tuple[Callable[[Trial, int], Cause | None], ...] = (
        *(_cut_otherwise, _differing_peers, _same_samples, _overlapping, _microbatches_again, _twice, _no_samples),
        *(_of_another_step, _lost, _wrong_microbatches, mismatched_labels, lost_labels),
    )
    return next((cause for step in trial.case.steps for name in names if (cause := name(trial, step))), None)


def _when(trial: Trial, step: int) -> str:
    if step == trial.first_step:
        return " after resuming" if trial.case.resume else ""
    return f" in step {step}"


def _cut_otherwise(trial: Trial, step: int) -> Cause | None:
    """Samples that are right, at positions that are not those of the cp rank."""
    case, ranks, when = trial.case, received_samples(trial, step), _when(trial, step)
    wanted = {rank: positions(case, rank, case.seq_len(step)) for rank in ranks}
    received_at = {rank: positions_received(trial, rank, step) for rank in ranks if case.dims.cp > 1}
    known = {rank: at for rank, at in received_at.items() if at is not None}
    odd = {rank: at for rank, at in known.items() if not np.array_equal(at, wanted[rank])}
    if not odd:
        return None
    rank, cut = next(iter(odd.items()))
    text = f"rank {rank} receives the tokens at {positions_text(cut)}{when}, expected {positions_text(wanted[rank])}"
    if all(len(at) == case.seq_len(step) for at in odd.values()) and len(odd) == len(ranks):
        whole = f"CP not applied: every cp rank receives whole sequences{when}"
        return Cause("CP not applied", whole, "", f"cp {case.dims.cp}")
    balance = case.features.cp_load_balance
    other = replace(case, features=replace(case.features, cp_load_balance=not balance))
    if all(np.array_equal(at, positions(other, rank, case.seq_len(step))) for rank, at in known.items()):
        observed = f"cp_load_balance {balance} is requested, {not balance} is observed"
        return Cause("another load balance", observed, hint=text)
    if len({at.tobytes() for at in odd.values()} | {wanted[rank].tobytes() for rank in set(ranks) - set(odd)}) == 1:
        observed = f"the sequence is not divided over cp: every rank receives the tokens at {positions_text(cut)}{when}"
        return Cause("sequence not divided over cp", observed)
    return Cause("sequence cut otherwise", "cp ranks receive the wrong part of the sequence", hint=text)


def _differing_peers(trial: Trial, step: int) -> Cause | None:
    ranks = received_samples(trial, step)
    for axis in ("tp", "cp"):
        for peers in trial.plan.groups.get(axis, ()):
            odd = [rank for rank in peers if ranks.get(rank) != ranks.get(peers[0])]
            if odd:
                observed = f"{axis} peers receive different samples{_when(trial, step)}"
                return Cause("peers differ", observed, hint=f"{rank_words(odd)} unlike rank {peers[0]}")
    return None


def _same_samples(trial: Trial, step: int) -> Cause | None:
    shares = shares_of_samples(trial, step)
    for ids in (ids for ids in shares.values() if None not in ids):
        same = [rank for rank, others in shares.items() if others == ids]
        if len(same) > 1:
            text = f"{rank_words(same)} received the same samples{_when(trial, step)}"
            return Cause("same samples", f"{text}, dp ranks must partition the global batch")
    return None


def _overlapping(trial: Trial, step: int) -> Cause | None:
    shares, when = shares_of_samples(trial, step), _when(trial, step)
    for one, other in itertools.combinations(shares, 2):
        if (set(shares[one]) & set(shares[other])) - {None}:
            text = f"dp ranks draw overlapping samples{when}: some are received more than once"
            return Cause("samples overlap", text)
    return None


def _microbatches_again(trial: Trial, step: int) -> Cause | None:
    """Told of the first rank that repeats some, and of all that repeat the same ones."""
    found = {rank: repeated_microbatches(trial, rank, step) for rank in _receiving_twice(trial, step)}
    if not (again := next(filter(None, found.values()), None)):
        return None
    ranks, shares = [rank for rank in found if found[rank] == again], shares_of_samples(trial, step)
    always = all(repeated_microbatches(trial, rank, other) == again for rank in ranks for other in trial.case.steps)
    which = ", and ".join(_repeated_text(trial, ranks[0], step, [early, *late]) for early, late in again.items())
    where = f"on {rank_words(ranks)}" if len(ranks) < len(shares) else "on every rank"
    text = f"in {'each step' if always else f'step {step}'} {which} {where}"
    wanted = set(trial.reference.samples[step - 1])
    if lost := wanted.difference(*shares.values()):
        text += f", {len(lost)} of {len(wanted)} samples are received by no rank"
    elif _without_loss(trial, step, ranks[0], later := [late - 1 for several in again.values() for late in several]):
        of = " and ".join(str(late + 1) for late in later)
        return Cause("odd traces", f"the model runs outside training passes: {text}, no loss for microbatch {of}")
    return Cause("microbatches repeated", text)


def _repeated_text(trial: Trial, rank: int, step: int, numbers: Sequence[int]) -> str:
    """Which of them the tokens belong to, where labels tell."""
    other = labelled_otherwise(trial, rank, step) & {*numbers}
    right = [number for number in numbers if number not in other]
    if other and len(right) == 1:
        which = f"microbatch{'es' * (len(other) > 1)} {positions_text(np.array(sorted(other)))}"
        return (
            f"{which} {'have' if len(other) > 1 else 'has'} the tokens of microbatch {right[0]}, and labels of its own"
        )
    return f"microbatches {positions_text(np.array(numbers))} have the same tokens"


def _without_loss(trial: Trial, step: int, rank: int, numbers: Sequence[int]) -> bool:
    """Of these passes, while of others there is one."""
    passes = parts_of(trial, rank, step)
    unseen = {number for number, part in enumerate(passes) if part.loss_sum is None}
    return unseen == {*numbers} and len(unseen) < len(passes)


def _twice(trial: Trial, step: int) -> Cause | None:
    twice = _receiving_twice(trial, step)
    return Cause("samples overlap", f"rank {twice[0]} receives a sample twice{_when(trial, step)}") if twice else None


def _receiving_twice(trial: Trial, step: int) -> list[int]:
    """Ranks that receive one of the recipe's samples more than once."""
    shares = shares_of_samples(trial, step)
    return [rank for rank, ids in shares.items() if None not in ids and len(set(ids)) < len(ids)]


def _no_samples(trial: Trial, step: int) -> Cause | None:
    ranks, steps = received_samples(trial, step), len(trial.reference.samples)
    strange = [rank for rank, ids in ranks.items() if None in ids]
    if not strange:
        return None
    where = on_ranks(trial, strange) or " on all ranks"
    text = f"rows received{_when(trial, step)}{where} are none of the recipe's {steps} steps"
    known = described(trial, step, strange)
    if place := begun_elsewhere(trial, step, strange):
        return Cause("data position", f"the data position is wrong{_when(trial, step)}: {place}")
    if _share_rows(trial):
        own = "dp ranks draw overlapping samples, each in its own order"
        return Cause("samples overlap", f"{own}; {text}", hint=known)
    return Cause("samples of no step", text, hint=known)


def _share_rows(trial: Trial) -> bool:
    """Whether two dp ranks receive one row of tokens at any time, although the recipe feeds each sample once."""
    planned = [id_ for ids in trial.reference.samples for id_ in ids]
    seen: dict[int, set[bytes]] = {rank: set() for rank in trial.one_rank_per_share()}
    for rank, step in itertools.product(seen, trial.case.steps):
        seen[rank] |= {row.tobytes() for row in rows_received(trial, step).get(rank, [])}
    overlap = any(one & other for one, other in itertools.combinations(seen.values(), 2))
    return len(set(planned)) == len(planned) and overlap


def _of_another_step(trial: Trial, step: int) -> Cause | None:
    """All of one, as after a position that is wrong; or some only."""
    shares, wanted = shares_of_samples(trial, step), trial.reference.samples[step - 1]
    foreign = {rank: set(ids) - set(wanted) for rank, ids in shares.items() if set(ids) - set(wanted)}
    if not foreign:
        return None
    all_of, ids = {step_received(trial, shares[rank]) for rank in foreign}, set().union(*foreign.values())
    others = [other for other, of_step in enumerate(trial.reference.samples, start=1) if ids & set(of_step)]
    steps, where = ", ".join(map(str, others)), on_ranks(trial, foreign) * (len(foreign) < len(shares))
    if trial.case.resume and step == trial.first_step:
        of_one = len(others) == 1 and None not in all_of
        which = f"the samples of step {others[0]}" if of_one else "samples of other steps"
        what = "restarts" if all_of == {1} else "is wrong"
        return Cause("data position", f"the data position {what} after resuming: step {step} receives {which}{where}")
    if None not in all_of and not where and len(others) == 1:
        from harness.reference.data import STEPS_PER_EPOCH

        off = step - others[0]
        far = f"{abs(off)} step{'s' * (abs(off) > 1)} {'ahead' if off < 0 else 'behind'}"
        far += ", in the order of the previous epoch" * (off == STEPS_PER_EPOCH and trial.case.training.data is None)
        told = f"step {step} trains on samples of step {steps}: the data are {far}{further_ahead(trial, step)}"
        return Cause("data position", told)
    if how := dealt_otherwise(trial, step):
        return Cause("samples dealt otherwise", how, hint=f"in step {step} some are those of step {steps}")
    received_of = {rank: sum(id_ in foreign.get(rank, ()) for id_ in shares[rank]) for rank in shares}
    count = f"{sum(received_of.values())} of {len(wanted)} samples"
    return Cause("data position", f"{count} received in step {step} are those of step {steps}{where}")


def _lost(trial: Trial, step: int) -> Cause | None:
    wanted = set(trial.reference.samples[step - 1])
    missing = wanted - {id_ for ids in shares_of_samples(trial, step).values() for id_ in ids}
    observed = f"{len(missing)} of {len(wanted)} samples are received by no rank{_when(trial, step)}"
    return Cause("samples lost", observed) if missing else None


def _wrong_microbatches(trial: Trial, step: int) -> Cause | None:
    wanted = [trial.case.local_batch] * trial.case.passes
    for rank in received_samples(trial, step):
        record = next(record for record in trial.ranks[rank].steps if record.step == step)
        sizes = [len(part.tokens) for part in record.microbatches if part.tokens is not None]
        if sizes != wanted:
            observed = f"accumulation: rank {rank} ran microbatches of {sizes} samples in step {step}"
            return Cause("microbatches", observed, expected=f"{wanted}")
    return None
