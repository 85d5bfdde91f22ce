"""Tokens of a trainer whose context parallelism cuts a microbatch's samples as one row, as if it had cut each sample.

What the ranks of one cp group received together is the same either way; so nothing that is wrong becomes right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from harness.core.case.case import Case
from harness.core.evidence.records import RankEvidence, Run
from harness.core.evidence.step import Microbatch, StepEvidence
from harness.core.judge.trial import Trial
from harness.core.plan.stages import positions


def by_sample(trial: Trial) -> Trial:
    """Return the trial with tokens, labels and positions where a plan expects them; the same for other trainers."""
    if trial.case.dims.cp == 1 or not trial.traits.cp_cuts_rows:
        return trial
    repeat = None if trial.repeat is None else _recut_run(trial, trial.repeat)
    return replace(trial, run=_recut_run(trial, trial.run), repeat=repeat)


def _recut_run(trial: Trial, run: Run) -> Run:
    ranks = dict(run.ranks)
    for line in trial.plan.groups["cp"]:
        if all(rank in ranks for rank in line):
            for rank, steps in _of_line(trial.case, {rank: ranks[rank] for rank in line}).items():
                ranks[rank] = replace(ranks[rank], steps=steps)
    return replace(run, ranks=ranks)


def _of_line(case: Case, line: Mapping[int, RankEvidence]) -> dict[int, tuple[StepEvidence, ...]]:
    found: dict[int, list[StepEvidence]] = {rank: [] for rank in line}
    for seen in zip(*(evidence.steps for evidence in line.values()), strict=False):
        steps = dict(zip(line, seen, strict=True))
        length = case.seq_len(seen[0].step)
        parts = _parts(case, {rank: step.microbatches for rank, step in steps.items()}, length)
        whole = _parts(case, {rank: step.evaluated for rank, step in steps.items()}, case.training.seq_len)
        at = _arrays(case, {rank: step.positions for rank, step in steps.items()}, length)
        for rank, step in steps.items():
            evaluated = whole[rank]
            found[rank].append(replace(step, microbatches=parts[rank], positions=at[rank], evaluated=evaluated))
    return {rank: tuple(steps) for rank, steps in found.items()}


def _parts(case: Case, parts: Mapping[int, Sequence[Microbatch]], length: int) -> dict[int, tuple[Microbatch, ...]]:
    done: dict[int, list[Microbatch]] = {rank: [] for rank in parts}
    for together in zip(*parts.values(), strict=False):
        seen = dict(zip(parts, together, strict=True))
        tokens = _recut(case, {rank: part.tokens for rank, part in seen.items()}, length)
        labels = _recut(case, {rank: part.labels for rank, part in seen.items()}, length)
        for rank, part in seen.items():
            done[rank].append(replace(part, tokens=tokens[rank], labels=labels[rank]))
    return {rank: (*done[rank], *parts[rank][len(done[rank]) :]) for rank in parts}


def _arrays(case: Case, arrays: Mapping[int, Sequence[np.ndarray]], length: int) -> dict[int, tuple[np.ndarray, ...]]:
    """The different positions of a step. Where ranks have several and not as many, those of one microbatch are not known."""
    if len({len(each) for each in arrays.values()}) > 1:
        return dict.fromkeys(arrays, ())
    cut = [_recut(case, dict(zip(arrays, seen, strict=True)), length) for seen in zip(*arrays.values(), strict=True)]
    return {rank: tuple(one[rank] for one in cut) for rank in arrays}


def _recut(case: Case, held: Mapping[int, Any], length: int) -> dict[int, Any]:
    """held: by rank of a cp group what it has of a row of samples of this length. Anything else is returned as it is."""
    sizes = {-1 if each is None else each.size for each in held.values()}
    size = sizes.pop() * len(held)
    halves = 2 * len(held) if case.features.cp_load_balance else len(held)
    if sizes or size <= 0 or size % length or size % halves:
        return dict(held)
    row = np.empty(size, dtype=np.int64)
    for rank, each in held.items():
        row[positions(case, rank, size)] = each.reshape(-1)
    samples = row.reshape(-1, length)
    return {rank: samples[:, positions(case, rank, length)] for rank in held}
