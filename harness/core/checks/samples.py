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
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from harness.core.evidence.keys import steps_text
from harness.core.evidence.summary import Summary
from harness.core.evidence.text import positions_text, ranks_text
from harness.core.judge.finding import Finding, Value
from harness.core.judge.labels import arrange_labels
from harness.core.judge.observed import group_ranks_by
from harness.core.judge.places import first_stage_peer, last_stage_ranks, representative_of_shares
from harness.core.judge.received_samples import (
    StepSamples,
    microbatches_of,
    received_positions_of,
    received_token_rows,
    sample_id_by_tokens,
    samples_of_step,
    wrong_microbatch_sizes,
)
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.stages import token_positions_of_rank

STAGE = "data"
NEEDS = frozenset({"samples"})
LEAST_SHARED_SAMPLES = 4
"""Samples that two ranks share in a step, on average, by more than chance."""
MOST_COMPARED_RANKS = 64
"""Ranks of which each two are compared by single samples."""


def check(trial: Trial) -> Result:
    return _judge_recipe(trial) if "reference" in trial.provided else _judge_digests(trial)


def _judge_recipe(trial: Trial) -> Result:
    """Return the verdict on samples, microbatches, positions and labels of all steps, by the recipe's samples."""
    findings: list[Finding] = []
    examined = 0
    for step in trial.case.steps:
        received = samples_of_step(trial, step)
        examined += sum(len(ids) for ids in received.by_rank.values())
        findings += _partition_findings(trial, received, step) + _microbatch_findings(trial, step)
        findings += _position_findings(trial, step) or _unknown_row_findings(received, step)
        findings += (
            _peer_findings(trial, received, step) + label_count_findings(trial, step) + _label_findings(trial, step)
        )
    return verdict_of("samples", findings, examined)


def _position_findings(trial: Trial, step: int) -> list[Finding]:
    """Return a finding of each rank whose rows are samples, but not at the positions of this cp rank. Unknown rows give
    none.
    """
    findings = []
    for rank in received_token_rows(trial, step):
        received_positions = received_positions_of(trial, rank, step)
        wanted = token_positions_of_rank(trial.case, rank, trial.case.seq_len(step))
        if received_positions is not None and not np.array_equal(received_positions, wanted):
            subject: dict[str, Any] = {"step": step, "quantity": "positions of the tokens received"}
            findings.append(Finding.at(rank, positions_text(wanted), positions_text(received_positions), **subject))
    return findings


def _unknown_row_findings(received: StepSamples, step: int) -> list[Finding]:
    """Return a finding of each rank that received rows of tokens that are no sample."""
    return [
        Finding.at(
            rank, 0, ids.count(None), step=step, quantity="rows of tokens that are no sample of the recipe's steps"
        )
        for rank, ids in received.by_rank.items()
        if None in ids
    ]


def _peer_findings(trial: Trial, received: StepSamples, step: int) -> list[Finding]:
    """Return findings of ranks that received other samples than the first of their tp or cp peers."""
    findings = []
    for axis in ("tp", "cp"):
        for rank, ids in received.by_rank.items():
            peers = trial.plan.peers(rank, axis)
            ids_of_first = received.by_rank.get(peers[0])
            if ids != ids_of_first:
                subject: dict[str, Any] = {
                    "step": step,
                    "quantity": "samples",
                    "axis": axis,
                    "group": peers,
                    "note": f"expected: those of rank {peers[0]}",
                }
                findings.append(Finding.at(rank, _ids_value(ids_of_first), _ids_value(ids), **subject))
    return findings


def _partition_findings(trial: Trial, received: StepSamples, step: int) -> list[Finding]:
    """Return a finding if the data-parallel ranks together did not receive each sample of the step once."""
    shares = received.on_ranks(representative_of_shares(trial))
    counts = shares.counts
    if counts == received.requested:
        return []
    wanted = {*received.requested}
    twice = sorted(id_ for id_, count in counts.items() if count > 1)
    received_by_none = sorted(received.missing)
    received_by_some_peers = sorted(shares.missing - received.missing)
    foreign = sorted({*counts} - wanted)
    kinds = [("received more than once", twice), ("received by no rank", received_by_none)]
    kinds += [("received by some tp or cp peers only", received_by_some_peers), ("of another step", foreign)]
    observed = "; ".join(f"{len(ids)} {text} ({_ids_text(ids)})" for text, ids in kinds if ids)
    expected = f"each of {received.requested.total()} samples received by one dp rank"
    first_share = representative_of_shares(trial)[:1]
    twins = next((ranks for ranks in shares.ranks_alike if ranks[:1] == tuple(first_share)), ())
    note = f"ranks {ranks_text(twins)} received the same" if twins else ""
    return [Finding(ranks=twins, step=step, quantity="samples", expected=expected, observed=observed, note=note)]


def _ids_value(ids: list[int | None] | None) -> Value:
    return tuple(ids) if ids else None


def _microbatch_findings(trial: Trial, step: int) -> list[Finding]:
    """Return findings of first stages that received another number of microbatches, or other sizes, than requested.

    Accumulation must leave a trace: the same batch in one piece gives the same gradient.
    """
    return [
        Finding.at(rank, expected_sizes, sizes, step=step, quantity="samples of each microbatch")
        for rank, (sizes, expected_sizes) in wrong_microbatch_sizes(trial, step).items()
    ]


def label_count_findings(trial: Trial, step: int) -> list[Finding]:
    """Return findings of losses that were not computed from a label for each token that their pipeline received.

    They may be computed in any number of calls. Labels that do not count may be left out.
    """
    findings = []
    for rank in last_stage_ranks(trial):
        received = microbatches_of(trial, first_stage_peer(trial, rank), step)
        token_counts = [microbatch.tokens.size for microbatch in received if microbatch.tokens is not None]
        losses = [microbatch for microbatch in microbatches_of(trial, rank, step) if microbatch.loss_sum is not None]
        label_counts = [0 if microbatch.labels is None else microbatch.labels.size for microbatch in losses]
        own_labels = _own_labels(trial, rank, step)
        is_complete: list[bool] = []
        for microbatch, token_count, token_labels in zip(losses, token_counts, own_labels, strict=False):
            if microbatch.labels is None:
                is_complete.append(False)
            elif microbatch.labels.size == token_count:
                is_complete.append(True)
            else:
                is_complete.append(token_labels is not None and arrange_labels(microbatch, token_labels) is not None)
        if label_counts and not (len(label_counts) == len(token_counts) and all(is_complete)):
            subject: dict[str, Any] = {
                "step": step,
                "quantity": "labels of each microbatch",
                "note": "expected: a label for each token",
            }
            findings.append(Finding.at(rank, tuple(token_counts), tuple(label_counts), **subject))
    return findings


def _label_findings(trial: Trial, step: int) -> list[Finding]:
    """Return a finding of each last stage that was given labels that are not those of its samples."""
    return [
        Finding.at(rank, 0, len(pairs), step=step, quantity="labels that are not those of its tokens")
        for rank, pairs in wrong_labels(trial, step).items()
        if pairs
    ]


def wrong_labels(trial: Trial, step: int) -> dict[int, list[tuple[int, int, int]]]:
    """Return, by last stage, the labels of a step that are not those of the samples received.

    Each is (position, label, the token's own label).
    """
    wrong: dict[int, list[tuple[int, int, int]]] = {}
    for rank in last_stage_ranks(trial):
        rank_positions = token_positions_of_rank(trial.case, rank, trial.case.seq_len(step)).tolist()
        labelled = [microbatch for microbatch in microbatches_of(trial, rank, step) if microbatch.labels is not None]
        wrong[rank] = []
        for microbatch, own_labels in zip(labelled, _own_labels(trial, rank, step), strict=False):
            if own_labels is None:
                continue
            labels = arrange_labels(microbatch, own_labels)
            if labels is None:
                continue
            for row, own_row in zip(labels.tolist(), own_labels.tolist(), strict=True):
                entries = zip(rank_positions, row, own_row, strict=True)
                wrong[rank] += [entry for entry in entries if entry[1] != entry[2]]
    return wrong


def _own_labels(trial: Trial, rank: int, step: int) -> list[np.ndarray | None]:
    """Return the right labels [samples, positions] of each microbatch that the pipeline of this last stage received.

    None for a microbatch with tokens that are no sample's, or of another width than this rank's positions.
    """
    reference = trial.reference
    rank_positions = token_positions_of_rank(trial.case, rank, trial.case.seq_len(step))
    row_of = {id_: row for row, id_ in enumerate(reference.sample_ids)}
    feeder = first_stage_peer(trial, rank)
    id_of_row = sample_id_by_tokens(trial, feeder, step)
    labels: list[np.ndarray | None] = []
    for microbatch in microbatches_of(trial, feeder, step):
        if microbatch.tokens is not None:
            ids = [id_of_row.get(row.tobytes()) for row in microbatch.tokens]
            if None in ids or microbatch.tokens.shape[1] != len(rank_positions):
                labels.append(None)
                continue
            rows = [row_of[id_] for id_ in ids if id_ is not None]
            labels.append(reference.labels[rows][:, rank_positions])
    return labels


def _ids_text(ids: list[int]) -> str:
    """Return sample ids in words, at most four of them."""
    return ", ".join(map(str, ids[:4])) + (", ..." if len(ids) > 4 else "")


# ---- where only digests of inputs are there


def _judge_digests(trial: Trial) -> Result:
    """Return the verdict by digests of inputs. Ranks that differ in another axis than data parallelism and tp are not
    compared.

    NOT APPLICABLE without data parallelism, unless tp ranks are fed tokens. UNKNOWN if some rank's inputs were not
    seen, or if ranks are fed partly the same.
    """
    dims = trial.plan.dims
    other_tokens, compared = _compare_tokens(trial)
    if dims.dp == 1:
        if compared:
            return verdict_of("samples", other_tokens, compared)
        reason = "no data parallelism"
        if dims.tp > 1:
            reason += ", and tp ranks are fed no tokens"
        return not_applicable("samples", reason)
    with_inputs = {summary.rank for summary in trial.rank_summaries if summary.received.batches}
    if len(with_inputs) < len(trial.rank_summaries) and not other_tokens:
        ended = any(summary.progress.steps_seen for summary in trial.rank_summaries)
        reason = "no input tensor of a model was seen" if ended else "no step has ended"
        if ended and with_inputs:
            without_inputs = tuple(summary.rank for summary in trial.rank_summaries if not summary.received.batches)
            reason += f" on ranks {ranks_text(without_inputs)}"
        return Result("samples", Verdict.UNKNOWN, note=reason)
    result = verdict_of("samples", [*other_tokens, *_same_samples_findings(trial)], len(with_inputs))
    if result.findings:
        return result
    doubt = _partly_same_text(trial) or _shared_samples_text(trial) or _same_indices_text(trial)
    return replace(result, verdict=Verdict.UNKNOWN, note=doubt) if doubt else result


def _compare_tokens(trial: Trial) -> tuple[list[Finding], int]:
    """Return (a finding of each rank that received other tokens than the first of its tp peers, number of comparisons).

    A comparison is of one rank and step. Ranks without tokens are left out.
    """
    tokens = {summary.rank: summary.received.tokens for summary in trial.rank_summaries if summary.received.tokens}
    findings: list[Finding] = []
    compared = 0
    for first, *peers in trial.plan.groups.get("tp", ()):
        for rank in peers:
            if first not in tokens or rank not in tokens:
                continue
            common_steps = sorted(tokens[first].keys() & tokens[rank].keys())
            compared += len(common_steps)
            if differing_steps := tuple(step for step in common_steps if tokens[rank][step] != tokens[first][step]):
                note = f"in {steps_text(differing_steps)}"
                subject: dict[str, Any] = {"step": differing_steps[0], "quantity": "tokens", "note": note}
                findings.append(Finding.at(rank, f"those of its tp peer, rank {first}", "others", **subject))
    return findings, compared


def _data_parallel_planes(trial: Trial) -> list[list[Summary]]:
    """Return lists of the ranks that differ in data parallelism alone, of those that were fed something."""
    planes: dict[tuple[int, ...], list[Summary]] = {}
    for summary in trial.rank_summaries:
        if summary.received.batches:
            mesh_coordinate = coordinate_of_rank(trial.plan.dims, summary.rank)
            key = (mesh_coordinate["pp"], mesh_coordinate["cp"], mesh_coordinate["tp"])
            planes.setdefault(key, []).append(summary)
    return [*planes.values()]


def _same_samples_findings(trial: Trial) -> list[Finding]:
    """Return a finding of each set of data-parallel ranks that are fed the same in every step."""
    findings = []
    for summaries in _data_parallel_planes(trial):
        for (digest_by_step, _), ranks in group_ranks_by(
            summaries, lambda summary: (_sorted_items(summary.received.batches), _sorted_items(summary.received.inputs))
        ).items():
            if len(ranks) > 1:
                note = f"in {steps_text(tuple(step for step, _ in digest_by_step))}"
                subject: dict[str, Any] = {"ranks": tuple(ranks), "quantity": "samples", "note": note}
                findings.append(Finding(**subject, expected="others on each data-parallel rank", observed="the same"))
    return findings


def _sorted_items(by_step: Mapping[int, Any]) -> tuple[tuple[int, Any], ...]:
    """Return (step, value) pairs in the order of steps."""
    return tuple(sorted(by_step.items()))


def _partly_same_text(trial: Trial) -> str:
    """Return a text on ranks that are fed one tensor that is the same on them in every step, and others that are not.

    Empty where there are none. What is equal in all steps may be no sample. Tokens are: nothing is said about ranks whose
    tokens differ.
    """
    for summaries in _data_parallel_planes(trial):
        steps = tuple(sorted(set.intersection(*(set(summary.received.inputs) for summary in summaries))))
        input_counts: list[int] = []
        for summary in summaries:
            input_counts += [len(summary.received.inputs[step]) for step in steps]
        for index in range(min(input_counts, default=0)):
            for values, ranks in group_ranks_by(summaries, partial(_input_digests, steps, index)).items():
                tokens = {
                    _sorted_items(summary.received.tokens)
                    for summary in summaries
                    if summary.rank in ranks and summary.received.tokens
                }
                if len(ranks) > max(1, len(tokens)) and (len(steps) == 1 or len({*values}) > 1):
                    text = f"ranks {ranks_text(tuple(ranks))} are fed the same input {index + 1} in {steps_text(steps)}"
                    return f"{text}, and others besides: noise of a rank's own hides equal samples"
    return ""


def _shared_samples_text(trial: Trial) -> str:
    """Return a text on two ranks that are fed many of the same samples, and some in every step, in batches that differ.

    Empty where there are none. Each rank that shuffles the same samples by itself is fed such batches. What fills up an epoch
    is in one step alone.
    """
    for summaries in _data_parallel_planes(trial):
        with_samples = [summary for summary in summaries if summary.received.samples]
        for first, second in itertools.combinations(with_samples[:MOST_COMPARED_RANKS], 2):
            common_steps = sorted(first.received.samples.keys() & second.received.samples.keys())
            shared = [
                _count_shared(first.received.samples[step], second.received.samples[step]) for step in common_steps
            ]
            equal = sum(equal_in_step for equal_in_step, _ in shared)
            compared = sum(compared_in_step for _, compared_in_step in shared)
            some_in_every_step = all(equal_in_step for equal_in_step, _ in shared)
            if some_in_every_step and equal >= max(LEAST_SHARED_SAMPLES * len(shared), compared / 8, 1):
                text = f"ranks {ranks_text((first.rank, second.rank))} are fed some of the same samples"
                return f"{text} in {steps_text(tuple(common_steps))}: {equal} of {compared} that were compared"
    return ""


def _count_shared(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, int]:
    """Return how many digests are equal, and of how many that were compared.

    Each rank has its smallest digests, so that larger ones may be missing.
    """
    last = min(first[-1], second[-1])
    first_compared = {digest for digest in first if digest <= last}
    second_compared = {digest for digest in second if digest <= last}
    return len(first_compared & second_compared), max(len(first_compared), len(second_compared))


def _same_indices_text(trial: Trial) -> str:
    """Return a text on ranks that draw the same samples by their indices, and are fed other numbers that are no tokens.

    Empty where there are none.
    """
    for summaries in _data_parallel_planes(trial):
        for indices, ranks in group_ranks_by(summaries, _indices_without_tokens).items():
            if len(ranks) > 1:
                batches = "batch" if len(indices) == 1 else f"{len(indices)} batches"
                text = f"data loaders of ranks {ranks_text(tuple(ranks))} draw the same indices, in the first {batches}"
                return f"{text}: inputs differ by augmentation alone, or each rank has a data set of its own"
    return ""


def _indices_without_tokens(summary: Summary) -> tuple[int, ...] | None:
    """Return the indices that a rank's data loader drew. None if it drew none, or if the rank is fed tokens."""
    return None if summary.received.tokens else summary.received.drawn or None


def _input_digests(steps: tuple[int, ...], index: int, summary: Summary) -> tuple[int, ...]:
    """Return the digest of one input of a rank in each of these steps. index: which of the inputs of a step."""
    return tuple(summary.received.inputs[step][index] for step in steps)
