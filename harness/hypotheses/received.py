"""What ranks received, put together to the batches of one device, and the reference as trained on that; at which positions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from harness.core.causes.assume import another_reference
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.words import on_ranks
from harness.core.checks.positions import nearest_row, right_rows, wrong_rows
from harness.core.checks.samples import parts_of
from harness.core.evidence.step import Microbatch
from harness.core.evidence.text import positions_text
from harness.core.judge.labels import IGNORED, laid_out
from harness.core.judge.numbers import NotOnRecord, validated_on
from harness.core.judge.places import feeder_of, last_stage_ranks, one_rank_per_share
from harness.core.judge.received_samples import positions_received, received_samples, rows_received
from harness.core.judge.result import Cause, Lines
from harness.core.judge.trial import Trial
from harness.core.plan.stages import layers_of_stage, positions

FARTHEST = 4
"""Places by which labels may be shifted."""


@dataclass(frozen=True)
class Rows:
    """What one step received, int64 [rows, positions]. whole: False if the loss had labels that are not one a token."""

    tokens: np.ndarray
    labels: np.ndarray
    whole: bool = True


def received(trial: Trial, step: int) -> Rows | None:
    """The rows of all data-parallel shares, each put together from its cp ranks; None where they do not make up rows."""
    parts = [of_share(trial, rank, step) for rank in one_rank_per_share(trial)]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    tokens, labels = np.vstack([part.tokens for part in known]), np.vstack([part.labels for part in known])
    return Rows(tokens, labels, all(part.whole for part in known))


def of_share(trial: Trial, rank: int, step: int) -> Rows | None:
    """Return the rows of one data-parallel share, put together from its cp ranks; None where they do not make up rows."""
    length = trial.case.seq_len(step)
    pieces = {}
    for peer in trial.plan.peers(rank, "cp"):
        rows = rows_received(trial, step).get(peer)
        found = positions_received(trial, peer, step)
        at = positions(trial.case, peer, length) if found is None else found
        if not rows or any(len(row) != len(at) for row in rows):
            return None
        pieces[peer] = at, np.stack(rows)
    places = sorted(np.concatenate([at for at, _ in pieces.values()]))
    if len({len(rows) for _, rows in pieces.values()}) > 1 or places != [*range(length)]:
        return None
    tokens = np.empty((len(pieces[rank][1]), length), np.int64)
    for at, of_peer in pieces.values():
        tokens[:, at] = of_peer
    labels, whole = own_labels(trial, tokens), True
    for peer, (at, _) in pieces.items():
        seen, fits = _labels_seen(trial, peer, step, labels[:, at])
        labels[:, at], whole = seen, whole and fits
    return Rows(tokens, labels, whole)


def own_labels(trial: Trial, tokens: np.ndarray) -> np.ndarray:
    """Return the labels of the samples; rows that are no sample's have their next tokens."""
    samples = enumerate(trial.reference.tokens)
    known = {row[: tokens.shape[1]].tobytes(): trial.reference.labels[place] for place, row in samples}
    return np.stack([known.get(row.tobytes(), np.append(row[1:], IGNORED))[: len(row)] for row in tokens])


def _labels_seen(trial: Trial, feeder: int, step: int, own: np.ndarray) -> tuple[np.ndarray, bool]:
    """The labels that the loss of what this rank was fed was computed from, laid as its tokens lie."""
    ranks = (rank for rank in last_stage_ranks(trial) if feeder_of(trial, rank) == feeder)
    parts = [part for rank in ranks for part in parts_of(trial, rank, step) if part.labels is not None]
    if not parts or len(own) % len(parts):
        return own, True
    pieces = np.split(own, len(parts))
    laid = [(seen_labels(part, pieces[n]), pieces[n]) for n, part in enumerate(parts)]
    fits = all(part.labels is not None and part.labels.size * len(parts) == own.size for part in parts)
    return np.vstack([rows if found is None else found for found, rows in laid]), fits


def seen_labels(part: Microbatch, own: np.ndarray) -> np.ndarray | None:
    """[samples, positions], IGNORED where there is none; None where labels lie in no way that is known. Wrong ones may be
    right ones of other positions, of fewer if need be, and so may those without some positions that do not count."""
    laid, size = laid_out(part, own), 0 if part.labels is None else part.labels.size
    if laid is not None and np.array_equal(laid, own) and size in (own.size, (own != IGNORED).sum()):
        return laid
    for columns in _columns(part, len(own)):
        if columns.shape[1] <= own.shape[1] and shift_of(columns, own) is not None:
            padded = np.full_like(own, IGNORED)
            padded[:, : columns.shape[1]] = columns
            return padded
    return laid


def _columns(part: Microbatch, samples: int) -> Iterator[np.ndarray]:
    """Labels in rows of any length: as they lie, or put together from chunks along the sequence."""
    assert part.labels is not None
    flat = part.labels.ravel()
    if flat.size % samples == 0:
        yield flat.reshape(samples, flat.size // samples)
        if all(size % samples == 0 for size in part.chunks):
            pieces = np.split(flat, np.cumsum(part.chunks)[:-1])
            yield np.hstack([piece.reshape(samples, piece.size // samples) for piece in pieces])


def shift_of(labels: np.ndarray, own: np.ndarray) -> int | None:
    """Return how many places labels are shifted to later tokens: 0 for right ones, of however many positions."""
    width = own.shape[1]
    for by in sorted(range(-FARTHEST, FARTHEST + 1), key=abs):
        first, last = max(0, -by), min(labels.shape[1], width - by)
        if last - first >= width // 2 and np.array_equal(labels[:, first:last], own[:, first + by : last + by]):
            return by
    return None


def at_the_ends(trial: Trial, step: int, wrong: Mapping[int, list[tuple[int, int, int]]]) -> bool:
    """A label is the next token. At the end of a rank's part that is another rank's, and only there all are wrong."""
    for rank, labels in wrong.items():
        at = positions(trial.case, rank, trial.case.seq_len(step)).tolist()
        ends = {place for place, following in zip(at, [*at[1:], None], strict=True) if following != place + 1}
        if trial.case.dims.cp == 1 or not {place for place, _, _ in labels} <= ends:
            return False
    return True


def parts_of_samples(trial: Trial, step: int, ranks: tuple[int, ...]) -> int:
    """Return how many tokens into the step's samples all rows begin; 0 where they do not. Half of a row at least is known."""
    ids, length = trial.reference.samples[step - 1], trial.case.seq_len(step)
    samples = [trial.reference.tokens[trial.reference.sample_ids.index(id_)] for id_ in ids]
    rows = [row for rank in ranks for row in rows_received(trial, step)[rank]]
    for by in range(1, len(samples[0]) - length // 2):
        known = {sample[by : by + length].tobytes() for sample in samples}
        if all(row[: len(samples[0]) - by].tobytes() in known for row in rows):
            return by
    return 0


def share_rows(trial: Trial) -> bool:
    """Whether two dp ranks receive one row of tokens at any time, although the recipe feeds each sample once."""
    planned = [id_ for ids in trial.reference.samples for id_ in ids]
    seen: dict[int, set[bytes]] = {rank: set() for rank in one_rank_per_share(trial)}
    for rank, step in itertools.product(seen, trial.case.steps):
        seen[rank] |= {row.tobytes() for row in rows_received(trial, step).get(rank, [])}
    overlap = any(one & other for one, other in itertools.combinations(seen.values(), 2))
    return len(set(planned)) == len(planned) and overlap


def validated_rows(trial: Trial, step: int, ranks: tuple[int, ...]) -> bool:
    """Return whether all rows that these ranks received in a step are among those that ranks validated on."""
    shares = [of_share(trial, rank, step) for rank in ranks]
    validated = set[bytes]()
    for number in trial.case.steps:
        with suppress(NotOnRecord):
            batches = itertools.chain(*validated_on(trial, number).values())
            rows = itertools.chain(*(tokens for tokens, _ in batches))
            validated |= {np.asarray(row, np.int64)[: trial.case.seq_len(step)].tobytes() for row in rows}
    return all(own is not None and {row.tobytes() for row in own.tokens} <= validated for own in shares)


def whose_labels(trial: Trial, rows: Rows) -> str:
    """Say of which samples the wrong labels are: of others of the step, or of those of one other step; empty if of neither."""
    own = own_labels(trial, rows.tokens)
    if sorted(row.tobytes() for row in own) == sorted(row.tobytes() for row in rows.labels):
        return "they are those of other rows"
    labels = dict(zip(trial.reference.sample_ids, trial.reference.labels[:, : own.shape[1]], strict=True))
    of = {labels[id_].tobytes(): step for step, ids in enumerate(trial.reference.samples, start=1) for id_ in ids}
    steps = {of.get(seen.tobytes()) for seen, right in zip(rows.labels, own, strict=True) if (seen != right).any()}
    return f"they are those of step {steps.pop()}" if len(steps) == 1 and None not in steps else ""


def of_other_positions(trial: Trial, step: int, rows: Rows) -> str:
    """Say at which positions of the same samples the labels of a cp rank stand; empty where they stand nowhere in them."""
    length, own = trial.case.seq_len(step), own_labels(trial, rows.tokens)
    due = {rank: positions(trial.case, rank, length) for rank in trial.plan.peers(one_rank_per_share(trial)[0], "cp")}
    seen = {rank: _columns_of(rows.labels[:, at], own) for rank, at in due.items()}
    found = {rank: at for rank, at in seen.items() if at is not None}
    odd = [rank for rank, at in found.items() if not np.array_equal(at, due[rank])]
    if not odd or len(found) < len(seen):
        return ""
    (of, at), balance = (positions_text(by[odd[0]]) for by in (found, due)), trial.case.features.cp_load_balance
    text = f"rank {odd[0]} has the labels of positions {of} for its tokens at {at}"
    other = replace(trial.case, features=replace(trial.case.features, cp_load_balance=not balance))
    if all(np.array_equal(at, positions(other, rank, length)) for rank, at in found.items()):
        text += f": labels are cut over cp as by cp_load_balance {not balance}, tokens by {balance}"
    return text


def _columns_of(labels: np.ndarray, own: np.ndarray) -> np.ndarray | None:
    """Return the columns of `own` that these are, each another one; of equal ones that which goes on from the one before."""
    chosen: list[int] = []
    for same in (labels[:, :, None] == own[:, None, :]).all(axis=0):
        left = [at for at in np.flatnonzero(same).tolist() if at not in chosen]
        if not left:
            return None
        chosen.append(chosen[-1] + 1 if chosen and chosen[-1] + 1 in left else left[0])
    return np.array(chosen)


def shifted(trial: Trial, step: int, rows: Rows) -> int:
    """Return how many places labels that count are shifted to later tokens. They may be so in whole rows, or in each cp
    rank's part. It is 0 where they are not."""
    length, own = trial.case.seq_len(step), own_labels(trial, rows.tokens)
    nexts = np.where(own >= 0, own, np.append(rows.tokens[:, 1:], own[:, -1:], axis=1))
    cut = [positions(trial.case, place * trial.case.dims.tp, length) for place in range(trial.case.dims.cp)]
    for parts in ([np.arange(length)], cut):
        pieces = [(rows.labels[:, at], nexts[:, at]) for at in parts]
        found = (by for by in sorted(range(-FARTHEST, FARTHEST + 1), key=abs) if _are_shifted(pieces, by))
        if (by := next(found, None)) is not None:
            return by
    return 0


def _are_shifted(pieces: Sequence[tuple[np.ndarray, np.ndarray]], by: int) -> bool:
    """Say whether all labels that count, and half of them at least, are the tokens so many places after the next one."""
    same, counted = list[np.ndarray](), 0
    for labels, nexts in pieces:
        first, last = max(0, -by), labels.shape[1] - max(0, by)
        seen, wanted = labels[:, first:last], nexts[:, first + by : last + by]
        same.append((seen == wanted)[(seen >= 0) & (wanted >= 0)])
        counted += int((labels >= 0).sum())
    alike = np.concatenate(same)
    return bool(alike.all()) and 0 < counted <= 2 * len(alike)


def trained_on(trial: Trial, by_step: dict[int, Rows], counted: dict[int, float] | None = None) -> Trial:
    """Assume that these rows were the samples of these steps. counted: by step, how often the loss of each token counts in
    gradients."""
    reference, samples = trial.reference, list(trial.reference.samples)
    tokens, labels, ids = list(reference.tokens), list(reference.labels), list(reference.sample_ids)
    labelled: dict[int, bytes] = {}
    length = reference.tokens.shape[1]
    for step, rows in by_step.items():
        width, chosen = rows.tokens.shape[1], []
        known = {row[:width].tobytes(): place for place, row in enumerate(tokens)}
        for n, row in enumerate(rows.tokens):
            place, seen = known.get(row.tobytes(), len(ids)), rows.labels[n].tobytes()
            if labelled.get(place, seen) != seen:
                place = len(ids)  # the same tokens with other labels are another sample
            if place == len(ids):
                known[row.tobytes()] = place
                ids.append(max(ids) + 1)
                tokens.append(np.append(row, np.full(length - width, IGNORED)))
                labels.append(np.full(length, IGNORED))
            labelled[place] = seen
            labels[place] = np.append(rows.labels[n], labels[place][width:])
            chosen.append(ids[place])
        samples[step - 1] = tuple(chosen)
    changed = replace(reference, samples=tuple(samples), sample_ids=tuple(ids))
    trial = replace(trial, reference=replace(changed, tokens=np.stack(tokens), labels=np.stack(labels)))
    if counted is None:
        return another_reference(trial)

    def batch(step: int, own: Any) -> Any:
        return replace(own, counts=np.full(own.labels.shape, counted.get(step, 1.0)))

    return another_reference(trial, batch=batch)


# ---- positions


def other_positions(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Tokens are right, and the model turns their queries and keys by the angles of other positions."""
    if "positions" not in broken or (cause := wrong_positions(trial)) is None:
        return
    by_step = {step: _positions_by_layer(trial, step) for step in trial.case.steps}
    lines: Lines = (("positions", broken["positions"].findings[0]),)
    yield Hypothesis(cause, partial(_turned_by, by_step), 1, lines, ("positions",))


def wrong_positions(trial: Trial) -> Cause | None:
    """Return the cause if positions are not those of the tokens received, wherever these stand."""
    wrong: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}
    for rank, step, _ in trial.steps():
        found = positions_received(trial, rank, step.step)
        wanted = positions(trial.case, rank, trial.case.seq_len(step.step)) if found is None else found
        right = right_rows(trial, wanted, step.step)
        for row in wrong_rows(step.positions, right):
            wrong.setdefault(rank, (row, right))
    if not wrong:
        return None
    rank, (row, right) = next(iter(wrong.items()))
    text = f"rotary positions are not those of the tokens{on_ranks(trial, wrong)}"
    near = nearest_row(row, right)
    due = f"for its tokens at {positions_text(near)}"
    if near is not right[0]:
        due = f"where it should count {positions_text(near)} in documents, or {positions_text(right[0])} in the whole sequence"
    hint = f"rank {rank} receives positions {positions_text(row)} {due}"
    return Cause("positions", text, hint=hint, details=(("ranks", tuple(wrong)), ("first", int(row[0]))))


def _positions_by_layer(trial: Trial, step: int) -> dict[int, np.ndarray]:
    """[samples, positions] of one device's batch, each sample's put together from the cp ranks that received it."""
    found: dict[int, np.ndarray] = {}
    length, ids, fed = trial.case.seq_len(step), trial.reference.samples[step - 1], received_samples(trial, step)
    for rank in sorted(trial.ranks, reverse=True):
        own = positions(trial.case, rank, length)
        rows = _rows_of_positions(trial, rank, step, len(own))
        of = fed.get(feeder_of(trial, rank), [])
        for layer in (one for stage in trial.plan.stages[rank] for one in layers_of_stage(trial.case, stage)):
            whole = found.setdefault(layer, np.tile(np.arange(length), (len(ids), 1)))
            for at, id_ in enumerate(of):
                if id_ in ids and len(rows) in (1, len(of)):
                    whole[ids.index(id_), own] = rows[at % len(rows)]
    return found


def _rows_of_positions(trial: Trial, rank: int, step: int, width: int) -> list[np.ndarray]:
    """What a rank's model parts received: one row for all its samples, or one for each, where no two passes' were alike."""
    given = next((record.positions for record in trial.ranks[rank].steps if record.step == step), ())
    return [row for rows in given if rows.shape[-1] == width for row in rows.reshape(-1, width)]


def _turned_by(by_step: dict[int, dict[int, np.ndarray]], trial: Trial) -> Trial:
    from harness.reference.spellings import turned_by

    return another_reference(trial, altered=turned_by(by_step))
