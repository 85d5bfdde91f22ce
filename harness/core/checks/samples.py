"""In every step, data-parallel ranks partition the global batch, cp ranks its tokens, and tp peers receive the same ones.

Each first stage receives as many microbatches as accumulation and the pipeline ask for, all of one size.
Samples are recognised by their tokens, labels included; nothing that a data loader says is believed. Where the recipe's
samples are unknown, no two data-parallel ranks receive the same in every step, and tp peers receive the same tokens in each.
Ranks that are fed the same in part are undecided: noise of a rank's own hides equal samples. So are ranks whose loaders draw
the same indices, for augmentation does that, too, and ranks of which each shuffles the same samples by itself.
Inputs that are no integers may be cut over tp, as activations are under sequence parallelism.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from harness.core.evidence.keys import steps_text
from harness.core.evidence.step import Microbatch
from harness.core.evidence.summary import Summary
from harness.core.evidence.text import positions_text, ranks_text
from harness.core.judge.finding import Finding, Value
from harness.core.judge.labels import laid_out
from harness.core.judge.observed import together
from harness.core.judge.places import feeder_of, first_stage_ranks, last_stage_ranks, one_rank_per_share
from harness.core.judge.received_samples import (
    positions_received,
    received_samples,
    rows_of,
    rows_received,
    sizes_wanted,
)
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate
from harness.core.plan.stages import positions

STAGE = "data"
NEEDS = frozenset({"samples"})
LEAST = 4
"""Samples that two ranks share in a step, on average, by more than chance."""
MOST_RANKS = 64
"""Ranks of which each two are compared by single samples."""


def check(trial: Trial) -> Result:
    return _of_the_recipe(trial) if "reference" in trial.provided else _of_any_recipe(trial)


def _of_the_recipe(trial: Trial) -> Result:
    findings, examined = [], 0
    for step in trial.case.steps:
        wanted = trial.reference.samples[step - 1]
        received = received_samples(trial, step)
        examined += sum(len(ids) for ids in received.values())
        findings += _not_a_partition(trial, received, step, wanted) + _wrong_microbatches(trial, step)
        findings += _wrong_positions(trial, step) or _strangers(received, step)
        findings += _differing_peers(trial, received, step) + misshapen_labels(trial, step) + _wrong_labels(trial, step)
    return verdict_of("samples", findings, examined)


def _wrong_positions(trial: Trial, step: int) -> list[Finding]:
    """Rows that are samples, but not at the positions of this cp rank."""
    findings = []
    for rank in rows_received(trial, step):
        found = positions_received(trial, rank, step)
        wanted = positions(trial.case, rank, trial.case.seq_len(step))
        if found is not None and not np.array_equal(found, wanted):
            words = (positions_text(wanted), positions_text(found))
            findings.append(Finding.at(rank, *words, step=step, quantity="positions of the tokens received"))
    return findings


def _strangers(received: dict[int, list[int | None]], step: int) -> list[Finding]:
    return [
        Finding.at(
            rank, 0, ids.count(None), step=step, quantity="rows of tokens that are no sample of the recipe's steps"
        )
        for rank, ids in received.items()
        if None in ids
    ]


def _differing_peers(trial: Trial, received: dict[int, list[int | None]], step: int) -> list[Finding]:
    findings = []
    for axis in ("tp", "cp"):
        for rank in received:
            first = trial.plan.peers(rank, axis)[0]
            if received[rank] != received.get(first):
                what: dict[str, Any] = {
                    "step": step,
                    "quantity": "samples",
                    "axis": axis,
                    "group": trial.plan.peers(rank, axis),
                    "note": f"expected: those of rank {first}",
                }
                findings.append(Finding.at(rank, _ids(received.get(first)), _ids(received[rank]), **what))
    return findings


def _not_a_partition(
    trial: Trial, received: dict[int, list[int | None]], step: int, wanted: tuple[int, ...]
) -> list[Finding]:
    counts = Counter(id_ for rank in one_rank_per_share(trial) for id_ in received.get(rank, []) if id_ is not None)
    if counts == Counter(wanted):
        return []
    twice = sorted(id_ for id_, count in counts.items() if count > 1)
    anywhere = {id_ for ids in received.values() for id_ in ids}
    never, aside = sorted(set(wanted) - anywhere), sorted((set(wanted) & anywhere) - set(counts))
    foreign = sorted(set(counts) - set(wanted))
    parts = [("received more than once", twice), ("received by no rank", never)]
    parts += [("received by some tp or cp peers only", aside), ("of another step", foreign)]
    observed = "; ".join(f"{len(ids)} {text} ({_some(ids)})" for text, ids in parts if ids)
    expected = f"each of {len(wanted)} samples received by one dp rank"
    twins = _twins(trial, received)
    note = f"ranks {ranks_text(twins)} received the same" if twins else ""
    return [Finding(ranks=twins, step=step, quantity="samples", expected=expected, observed=observed, note=note)]


def _ids(ids: list[int | None] | None) -> Value:
    return tuple(ids) if ids else None


def _twins(trial: Trial, received: dict[int, list[int | None]]) -> tuple[int, ...]:
    """Nothing is known about rows that are no sample."""
    shares = one_rank_per_share(trial)
    known = {rank: ids for rank in shares if (ids := received.get(rank)) and None not in ids}
    same = [rank for rank in shares[1:] if rank in known and known[rank] == known.get(shares[0])]
    return (shares[0], *same) if same else ()


def _wrong_microbatches(trial: Trial, step: int) -> list[Finding]:
    """Accumulation must leave a trace: the same batch in one piece gives the same gradient."""
    findings = []
    for rank in first_stage_ranks(trial):
        wanted = sizes_wanted(trial, rank, step)
        for record in trial.ranks[rank].steps:
            sizes = tuple(len(part.tokens) for part in record.microbatches if part.tokens is not None)
            if record.step == step and sizes != wanted:
                findings.append(Finding.at(rank, wanted, sizes, step=step, quantity="samples of each microbatch"))
    return findings


def misshapen_labels(trial: Trial, step: int) -> list[Finding]:
    """Yield losses that were not computed from a label for each token that their pipeline received, in however many calls.
    Labels that do not count may be left out."""
    findings = []
    for rank in last_stage_ranks(trial):
        received = [
            part.tokens.size for part in parts_of(trial, feeder_of(trial, rank), step) if part.tokens is not None
        ]
        losses = [part for part in parts_of(trial, rank, step) if part.loss_sum is not None]
        seen = [0 if part.labels is None else part.labels.size for part in losses]
        own = _own_labels(trial, rank, step)
        whole = [
            part.labels is not None
            and (part.labels.size == size or (of is not None and laid_out(part, of) is not None))
            for part, size, of in zip(losses, received, own, strict=False)
        ]
        if seen and not (len(seen) == len(received) and all(whole)):
            what: dict[str, Any] = {
                "step": step,
                "quantity": "labels of each microbatch",
                "note": "expected: a label for each token",
            }
            findings.append(Finding.at(rank, tuple(received), tuple(seen), **what))
    return findings


def parts_of(trial: Trial, rank: int, step: int) -> list[Microbatch]:
    """The microbatches that a rank ran in a step."""
    return [part for record in trial.ranks[rank].steps if record.step == step for part in record.microbatches]


def _wrong_labels(trial: Trial, step: int) -> list[Finding]:
    """Where labels were seen, they are those of the sample."""
    return [
        Finding.at(rank, 0, len(pairs), step=step, quantity="labels that are not those of its tokens")
        for rank, pairs in wrong_labels(trial, step).items()
        if pairs
    ]


def wrong_labels(trial: Trial, step: int) -> dict[int, list[tuple[int, int, int]]]:
    """The labels of a step that are not those of the samples received, by last stage: (position, label, the token's own)."""
    found = {}
    for rank in last_stage_ranks(trial):
        at = positions(trial.case, rank, trial.case.seq_len(step)).tolist()
        seen = [part for part in parts_of(trial, rank, step) if part.labels is not None]
        found[rank] = [
            label
            for part, own in zip(seen, _own_labels(trial, rank, step), strict=False)
            if own is not None and (laid := laid_out(part, own)) is not None
            for row, wanted in zip(laid.tolist(), own.tolist(), strict=True)
            for label in zip(at, row, wanted, strict=True)
            if label[1] != label[2]
        ]
    return found


def _own_labels(trial: Trial, rank: int, step: int) -> list[np.ndarray | None]:
    """[samples, positions] of each microbatch received by the pipeline of this last stage: the labels of its samples; None for
    one with tokens that are no sample's."""
    reference, at = trial.reference, positions(trial.case, rank, trial.case.seq_len(step))
    row_of = {id_: row for row, id_ in enumerate(reference.sample_ids)}
    feeder = feeder_of(trial, rank)
    known, found = rows_of(trial, feeder, step), []
    for part in parts_of(trial, feeder, step):
        if part.tokens is not None:
            ids = [known.get(row.tobytes()) for row in part.tokens]
            whole = None not in ids and part.tokens.shape[1] == len(at)
            found.append(reference.labels[[row_of[id_] for id_ in ids if id_ is not None]][:, at] if whole else None)
    return found


def _some(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:4])) + (", ..." if len(ids) > 4 else "")


# ---- where only digests of inputs are there


def _of_any_recipe(trial: Trial) -> Result:
    """Compare inputs as digests. Ranks that differ in another axis are not compared."""
    dims = trial.plan.dims
    apart, compared = _other_tokens(trial)
    if dims.dp == 1:
        none = not_applicable("samples", "no data parallelism" + ", and tp ranks are fed no tokens" * (dims.tp > 1))
        return verdict_of("samples", apart, compared) if compared else none
    fed = {one.rank: tuple(sorted(one.fed.items())) for one in trial.glances if one.fed}
    if len(fed) < len(trial.glances) and not apart:
        ended = any(one.steps_seen for one in trial.glances)
        why = "no input tensor of a model was seen" if ended else "no step has ended"
        if ended and fed:
            why += f" on ranks {ranks_text(tuple(one.rank for one in trial.glances if not one.fed))}"
        return Result("samples", Verdict.UNKNOWN, note=why)
    found = verdict_of("samples", [*apart, *_fed_alike(trial)], len(fed))
    partly = "" if found.findings else _fed_alike_in_part(trial) or _single_alike(trial) or _drawn_alike(trial)
    return replace(found, verdict=Verdict.UNKNOWN, note=partly) if partly else found


def _other_tokens(trial: Trial) -> tuple[list[Finding], int]:
    """Return, by the first of its tp peers, each rank that received other tokens than that one; and how many were compared."""
    tokens = {one.rank: one.tokens for one in trial.glances if one.tokens}
    findings, compared = [], 0
    for first, *peers in trial.plan.groups.get("tp", ()):
        for rank in (peer for peer in peers if first in tokens and peer in tokens):
            both = sorted(tokens[first].keys() & tokens[rank].keys())
            compared += len(both)
            if other := tuple(step for step in both if tokens[rank][step] != tokens[first][step]):
                what: dict[str, Any] = {"step": other[0], "quantity": "tokens", "note": f"in {steps_text(other)}"}
                findings.append(Finding.at(rank, f"those of its tp peer, rank {first}", "others", **what))
    return findings, compared


def _planes(trial: Trial) -> list[list[Summary]]:
    """The ranks that differ in data parallelism alone, which were fed something."""
    planes: dict[tuple[int, ...], list[Summary]] = {}
    for one in (one for one in trial.glances if one.fed):
        at = coordinate(trial.plan.dims, one.rank)
        planes.setdefault((at["pp"], at["cp"], at["tp"]), []).append(one)
    return [*planes.values()]


def _fed_alike(trial: Trial) -> list[Finding]:
    findings = []
    for ranks in _planes(trial):
        for (fed, _), same in together(ranks, lambda one: (_steps(one.fed), _steps(one.inputs))).items():
            if len(same) > 1:
                note = f"in {steps_text(tuple(step for step, _ in fed))}"
                what: dict[str, Any] = {"ranks": tuple(same), "quantity": "samples", "note": note}
                findings.append(Finding(**what, expected="others on each data-parallel rank", observed="the same"))
    return findings


def _steps(told: Mapping[int, Any]) -> tuple[tuple[int, Any], ...]:
    return tuple(sorted(told.items()))


def _fed_alike_in_part(trial: Trial) -> str:
    """Which ranks are fed one tensor that is the same on them in every step, and others that are not; empty where none are.
    What is equal in all steps may be no sample. Tokens are: nothing is said about ranks whose tokens differ."""
    for ranks in _planes(trial):
        steps = tuple(sorted(set.intersection(*(set(one.inputs) for one in ranks))))
        for place in range(min((len(one.inputs[step]) for one in ranks for step in steps), default=0)):
            for values, same in together(ranks, partial(_input, steps, place)).items():
                tokens = {_steps(one.tokens) for one in ranks if one.rank in same and one.tokens}
                if len(same) > max(1, len(tokens)) and (len(steps) == 1 or len({*values}) > 1):
                    alike = f"ranks {ranks_text(tuple(same))} are fed the same input {place + 1} in {steps_text(steps)}"
                    return f"{alike}, and others besides: noise of a rank's own hides equal samples"
    return ""


def _single_alike(trial: Trial) -> str:
    """Name two ranks that are fed many of the same samples, and some in every step, in batches that differ; empty where none
    are. Each rank that shuffles the same samples by itself is fed such batches. What fills up an epoch is in one step alone."""
    for ranks in _planes(trial):
        known = [one for one in ranks if one.samples]
        for one, other in itertools.combinations(known[:MOST_RANKS], 2):
            both = sorted(one.samples.keys() & other.samples.keys())
            shared = [_shared(one.samples[step], other.samples[step]) for step in both]
            count, of = (sum(each) for each in zip(*shared, strict=True)) if shared else (0, 0)
            if all(in_step for in_step, _ in shared) and count >= max(LEAST * len(shared), of / 8, 1):
                which = f"ranks {ranks_text((one.rank, other.rank))} are fed some of the same samples"
                return f"{which} in {steps_text(tuple(both))}: {count} of {of} that were compared"
    return ""


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, int]:
    """Return how many are equal, and of how many. Each rank has its smallest digests, so that larger ones may be missing."""
    last = min(one[-1], other[-1])
    compared = [{digest for digest in digests if digest <= last} for digests in (one, other)]
    return len(compared[0] & compared[1]), max(map(len, compared))


def _drawn_alike(trial: Trial) -> str:
    """Which ranks draw the same samples by their indices, and are fed other numbers that are no tokens; empty where none do."""
    for ranks in _planes(trial):
        for drawn, same in together(ranks, lambda one: None if one.tokens else one.drawn or None).items():
            if len(same) > 1:
                batches = "batch" if len(drawn) == 1 else f"{len(drawn)} batches"
                alike = f"data loaders of ranks {ranks_text(tuple(same))} draw the same indices, in the first {batches}"
                return f"{alike}: inputs differ by augmentation alone, or each rank has a data set of its own"
    return ""


def _input(steps: tuple[int, ...], place: int, one: Summary) -> tuple[int, ...]:
    return tuple(one.inputs[step][place] for step in steps)
