"""Ranks start from other weights, or receive other samples, than the recipe says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from harness.checks.positions import wrong_rows
from harness.checks.samples import misshapen_labels, wrong_labels
from harness.diagnosis.layout import contents_line
from harness.diagnosis.words import Broken, finding_line, in_parameters, on_ranks, rank_words
from harness.evidence.records import Microbatch
from harness.evidence.text import positions_text
from harness.judge.contents import take
from harness.judge.received_samples import positions_received, received_samples
from harness.judge.result import Diagnosis, Lines, one_cause
from harness.judge.trial import Trial
from harness.plan.stages import positions

Received = dict[int, list[int | None]]  # sample ids by rank; None: tokens that are no sample of the recipe
Label = tuple[int, int, int]  # position, the label received, the sample's own


# ---- weights


def wrong_weights(trial: Trial, broken: Broken) -> Diagnosis | None:
    if "initial_weights" not in broken:
        return None
    for axis, groups in reversed(trial.plan.groups.items()):
        same = [_start_alike(trial, group) for group in groups]
        if all(same):
            one, other = groups[0][:2]
            cause = f"ranks along {axis} start from the same shard: rank {other} holds the values of rank {one}"
            cut = [fqn for fqn in trial.plan.shapes if trial.plan.slices[one][fqn] != trial.plan.slices[other][fqn]]
            where = "" if set(cut) == same[0] else " " + in_parameters(trial, [fqn for fqn in cut if fqn in same[0]])
            return one_cause(cause + where, tuple(contents_line(trial)))
    strange = [
        (rank, fqn) for rank, held in sorted(trial.holdings.items()) for fqn, part in held.items() if part is None
    ]
    if not strange:
        return None
    fqns = [fqn for fqn in trial.plan.shapes if fqn in {fqn for _, fqn in strange}]
    where = f"{in_parameters(trial, fqns)}{on_ranks(trial, [rank for rank, _ in strange])}"
    found = _all_alike(trial, strange) or _drawn_anew(trial, strange)
    cause = f"training does not start from the seed weights {where}{found}"
    return one_cause(cause, tuple(_strange_line(trial, *strange[0])))


def _all_alike(trial: Trial, strange: list[tuple[int, str]]) -> str:
    """What all of them are instead, if it is the same of all."""
    found = {_instead(trial, rank, fqn) for rank, fqn in strange}
    rank, fqn = strange[0]
    if all(text.startswith("the values of ") for text in found):
        return f": {fqn} holds {_instead(trial, rank, fqn)}"
    return f": {found.pop()}" if len(found) == 1 and "" not in found else ""


def _drawn_anew(trial: Trial, strange: list[tuple[int, str]]) -> str:
    """Whether a repeat of the run started from others again."""
    repeats = trial.repeat.ranks if trial.repeat else {}
    again = {(rank, t.fqn): t.value.tobytes() for rank, e in repeats.items() for t in e.parameters}
    first = {(rank, t.fqn): t.value.tobytes() for rank, e in trial.ranks.items() for t in e.parameters}
    anew = bool(again) and all(first[place] != again.get(place) for place in strange)
    return ": each run draws others, as without a seed" if anew else ""


def _instead(trial: Trial, rank: int, fqn: str) -> str:
    """A constant, a multiple of the seed weight, or another parameter's values; empty if it is none of these."""
    value = next(t.value for t in trial.ranks[rank].parameters if t.fqn == fqn)
    if np.all(value == value.flat[0]):
        return f"they are all {value.flat[0]:g}"
    part = trial.plan.slices[rank][fqn]
    wanted = take(trial.reference.weights[fqn], part)
    factor = float(np.sum(value * wanted) / np.sum(wanted * wanted)) if value.shape == wanted.shape else 0.0
    if factor and np.allclose(value, factor * wanted, rtol=1e-9, atol=0):
        return f"they are {factor:.6g} times these"
    alike = (name for name, full in trial.reference.weights.items() if full.shape == trial.reference.weights[fqn].shape)
    others = (
        name for name in alike if name != fqn and np.array_equal(take(trial.reference.weights[name], part), value)
    )
    return next((f"the values of {name}" for name in others), "")


def _strange_line(trial: Trial, rank: int, fqn: str) -> Iterator[tuple[str, str]]:
    value = next(t.value for t in trial.ranks[rank].parameters if t.fqn == fqn)
    wanted = take(trial.reference.weights[fqn], trial.plan.slices[rank][fqn])
    yield "weights", f"rank {rank}, {fqn}: {_how_they_differ(value, wanted)}"


def _how_they_differ(value: np.ndarray, wanted: np.ndarray) -> str:
    if value.shape != wanted.shape:
        return f"shape {value.shape}, expected {wanted.shape}"
    if value.dtype != wanted.dtype:
        return f"{value.dtype}, expected {wanted.dtype}"
    if not np.isfinite(value).all():
        return "not finite"
    if np.array_equal(value, wanted.astype(np.float32).astype(wanted.dtype)):
        return "the seed weights rounded to float32"
    return f"off by {np.max(np.abs(value - wanted)):.3g}, the largest seed weight is {np.max(np.abs(wanted)):.3g}"


def _start_alike(trial: Trial, group: tuple[int, ...]) -> set[str]:
    """Parameters that the plan cuts between the members, and of which all hold the first one's bytes, not the whole."""
    first, *others = [{t.fqn: t.value for t in trial.ranks[rank].parameters} for rank in group]
    mine, next_ones = trial.plan.slices[group[0]], trial.plan.slices[group[1]]
    cut = [f for f in first if f in mine and mine[f] != next_ones.get(f, mine[f]) and first[f].size]
    alike = {f for f in cut if all(f in other and other[f].tobytes() == first[f].tobytes() for other in others)}
    alike = {f for f in alike if np.any(first[f] != first[f].flat[0])}  # a constant has no slices to tell apart
    return alike if all(first[f].shape != trial.plan.shapes[f] for f in alike) else set()


# ---- samples


def wrong_samples(trial: Trial, broken: Broken) -> Diagnosis | None:
    """Named by the first step in which a rank receives something else than it should."""
    if "samples" not in broken:
        return None
    for step, wanted in enumerate(trial.reference.samples, start=1):
        cause = _name_samples(trial, step, set(wanted))
        if cause:
            return one_cause(cause, _sample_lines(trial, broken))
    return None


def _sample_lines(trial: Trial, broken: Broken) -> Lines:
    return tuple(("samples", f"{f.where}: {f.observed}") for f in broken["samples"].findings[:2] if f.observed)


def _name_samples(trial: Trial, step: int, wanted: set[int]) -> str | None:
    received = received_samples(trial, step)
    shares = {rank: received[rank] for rank in trial.one_rank_per_share() if rank in received}
    seen = {id_ for ids in shares.values() for id_ in ids}
    when = "" if step == 1 else f" in step {step}"
    return (
        _cut_otherwise(trial, received, step, when)
        or _differing_peers(trial, received, when)
        or _same_samples(shares, when)
        or _overlapping(shares, when)
        or _no_samples(trial, received, when)
        or (_of_another_step(trial, seen - wanted, step) if seen - wanted else None)
        or (f"samples received by nobody{when}: {len(wanted - seen)} of {len(wanted)}" if wanted - seen else None)
        or _wrong_microbatches(trial, received, step)
        or _wrong_labels(trial, step)
        or _lost_labels(trial, step)
    )


def _cut_otherwise(trial: Trial, received: Received, step: int, when: str) -> str | None:
    """Samples that are right, at positions that are not those of the cp rank."""
    if trial.case.dims.cp == 1:
        return None
    wanted = {rank: positions(trial.case, rank, trial.case.seq_len(step)) for rank in received}
    found = {rank: positions_received(trial, rank, step) for rank in received}
    odd = {rank: at for rank, at in found.items() if at is not None and not np.array_equal(at, wanted[rank])}
    if not odd:
        return None
    rank, cut = next(iter(odd.items()))
    text = f"rank {rank} receives the tokens at {positions_text(cut)}{when}, its positions are"
    text = f"{text} {positions_text(wanted[rank])}"
    if all(len(at) == trial.case.seq_len(step) for at in odd.values()) and len(odd) == len(received):
        return f"CP not applied: every cp rank receives whole sequences{when}, requested cp {trial.case.dims.cp}"
    features, balance = trial.case.features, trial.case.features.cp_load_balance
    other = replace(trial.case, features=replace(features, cp_load_balance=not balance))
    if all(np.array_equal(at, positions(other, rank, trial.case.seq_len(step))) for rank, at in odd.items()):
        return f"cp_load_balance {balance} is requested, {not balance} is observed: {text}"
    if len({at.tobytes() for at in odd.values()} | {wanted[rank].tobytes() for rank in set(received) - set(odd)}) == 1:
        return f"the sequence is not divided over cp: every rank receives the tokens at {positions_text(cut)}{when}"
    return f"cp ranks receive the wrong part of the sequence: {text}"


def _no_samples(trial: Trial, received: Received, when: str) -> str | None:
    strange = [rank for rank, ids in received.items() if None in ids]
    if not strange:
        return None
    steps = len(trial.reference.samples)
    text = (
        f"received tokens of no sample of the recipe's {steps} steps{when}{on_ranks(trial, strange) or ' on all ranks'}"
    )
    if _share_rows(trial):
        return f"dp ranks draw overlapping samples, each by an order of its own: {text}"
    return text + (": another seed, order or data set" if len(strange) == len(received) else "")


def _share_rows(trial: Trial) -> bool:
    """Whether two dp ranks receive one row of tokens at any time, although the recipe feeds each sample once."""
    planned = [id_ for ids in trial.reference.samples for id_ in ids]
    rows = [
        {row.tobytes() for step in trial.ranks[rank].steps for part in step.microbatches for row in _rows(part)}
        for rank in trial.one_rank_per_share()
    ]
    return len(set(planned)) == len(planned) and any(one & other for one, other in itertools.combinations(rows, 2))


def _rows(part: Microbatch) -> Iterator[np.ndarray]:
    yield from part.tokens if part.tokens is not None else ()


def _differing_peers(trial: Trial, received: Received, when: str) -> str | None:
    for axis in ("tp", "cp"):
        for peers in trial.plan.groups.get(axis, ()):
            odd = [rank for rank in peers if received.get(rank) != received.get(peers[0])]
            if odd:
                return (
                    f"{axis} peers receive different samples{when}: {rank_words(odd)} not what rank {peers[0]} receives"
                )
    return None


def _same_samples(shares: Received, when: str) -> str | None:
    for ids in (ids for ids in shares.values() if None not in ids):
        same = [rank for rank, others in shares.items() if others == ids]
        if len(same) > 1:
            return f"ranks {_short(same)} received the same samples{when}, dp ranks must partition the global batch"
    return None


def _short(ranks: list[int]) -> str:
    return rank_words(ranks).removeprefix("ranks ")


def _overlapping(shares: Received, when: str) -> str | None:
    for one, other in itertools.combinations(shares, 2):
        if (set(shares[one]) & set(shares[other])) - {None}:
            return f"dp ranks draw overlapping samples{when}: some are received twice and some by nobody"
    for rank, ids in shares.items():
        if None not in ids and len(set(ids)) < len(ids):
            return f"rank {rank} receives a sample twice{when}"
    return None


def _of_another_step(trial: Trial, foreign: set[int | None], step: int) -> str:
    steps = [str(other) for other, ids in enumerate(trial.reference.samples, start=1) if foreign & set(ids)]
    return f"step {step} trains on samples of step {', '.join(steps)}: the sampler is at another place of the data"


def _wrong_microbatches(trial: Trial, received: Received, step: int) -> str | None:
    wanted = [trial.case.local_batch] * trial.case.passes
    for rank in received:
        record = next(record for record in trial.ranks[rank].steps if record.step == step)
        sizes = [len(part.tokens) for part in record.microbatches if part.tokens is not None]
        if sizes != wanted:
            return f"accumulation: rank {rank} ran microbatches of {sizes} samples in step {step}, requested {wanted}"
    return None


def _wrong_labels(trial: Trial, step: int) -> str | None:
    wrong = {rank: labels for rank, labels in wrong_labels(trial, step).items() if labels}
    if not wrong:
        return None
    labels = [label for of_rank in wrong.values() for label in of_rank]
    hint = _shifted_after_the_cut(trial, step, wrong) or _mask_is_off(labels)
    text = f"{len(labels)} labels of step {step} are not those of their sample{hint}"
    return f"wrong labels{on_ranks(trial, wrong)}: tokens are right, {text}"


def _lost_labels(trial: Trial, step: int) -> str | None:
    """Each label is right, there are fewer or more of them than tokens: a part of the loss is lost, or counted twice."""
    if not (found := misshapen_labels(trial, step)):
        return None
    text = f"{found[0].observed} ({found[0].where}), {found[0].expected} are requested"
    return f"a part of the loss is lost or counted twice: it is computed from {text}"


def _shifted_after_the_cut(trial: Trial, step: int, wrong: dict[int, list[Label]]) -> str:
    """A label is the next token. At the end of a rank's part that is another rank's, and only there all are wrong."""
    for rank, labels in wrong.items():
        at = positions(trial.case, rank, trial.case.seq_len(step)).tolist()
        ends = {place for place, following in zip(at, [*at[1:], None], strict=True) if following != place + 1}
        if trial.case.dims.cp == 1 or not {place for place, _, _ in labels} <= ends:
            return ""
    return ": each is the last of a cp rank's part, as if labels were shifted after the sequence was cut"


def _mask_is_off(labels: list[Label]) -> str:
    """A mask that is too wide or too narrow leaves all other labels alone; a shift does not."""
    if all(label < 0 for _, label, _ in labels):
        return ": masked, where they should be trained on"
    return ": trained on, where they should be masked" if all(own < 0 for _, _, own in labels) else ""


# ---- positions


def wrong_positions(trial: Trial, broken: Broken) -> Diagnosis | None:
    """Tokens are right, and the model turns their queries and keys by the angles of other positions."""
    if "positions" not in broken:
        return None
    wrong: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for rank, step, _ in trial.steps():
        wanted = positions(trial.case, rank, trial.case.seq_len(step.step))
        for row in wrong_rows(step.positions, wanted)[:1]:
            wrong.setdefault(rank, (row, wanted))
    rank, (row, wanted) = next(iter(wrong.items()))
    text = f"rank {rank} receives positions {positions_text(row)} for its tokens at {positions_text(wanted)}"
    restarted = trial.case.dims.cp > 1 and all(np.array_equal(r, np.arange(len(r))) for r, _ in wrong.values())
    what = "rotary positions restart at 0 on each cp rank" if restarted else "wrong rotary positions"
    if not set(wrong) & set(trial.first_stages()):
        what = "later pipeline stages turn queries and keys by other positions than the first"
    return one_cause(f"{what}: {text}", (finding_line("positions", broken["positions"]),))
