"""A trial, put together from stored evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from harness.core.case import loading, traits
from harness.core.case.case import Case, CaseError
from harness.core.case.traits import TrainerTraits
from harness.core.evidence.reading import read_json
from harness.core.evidence.records import RankEvidence, Run
from harness.core.evidence.step import Microbatch, StepEvidence
from harness.core.evidence.store import (
    CASE_FILE,
    RUN_AGAIN,
    TRAITS_FILE,
    EvidenceError,
    load_run,
    load_stored,
    reading_evidence,
)
from harness.core.judge import golden
from harness.core.judge.order import flatten_trial
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.core.plan.stages import token_positions_of_rank
from harness.reference.record import ReferenceRun

T = TypeVar("T")


def load_trial(folder: Path) -> Trial:
    """Return the trial of the last launch in a case's folder, with the earlier launches in its `saved`.

    Tensors are flattened and samples are cut as the plan has them. Raises EvidenceError if the folder is not one that
    `harness run` wrote, or if a file is damaged. A golden that cannot be loaded leaves its reason in `golden_problem`.
    """
    case, chosen = load_case(folder)
    references = {}
    for launch in golden.launches_with_reference(case):
        references[launch.model_of] = (_reference(folder, launch), *_golden_or_problem(launch))
    trials: list[Trial] = []
    for name, launched in case.launches.items():
        run = load_run(folder / name)
        reference, accepted, problem = references[launched.model_of]
        trial = Trial(
            case=launched,
            plan=make_plan(launched, chosen[name]),
            run=run,
            reference=reference,
            repeat=load_run(folder / "repeat") if launched.runs > 1 else None,
            golden=accepted,
            golden_problem=problem,
            saved=tuple(trials),
        )
        trials.append(recut_by_sample(flatten_trial(trial)))
    return trials[-1]


def reference_file(launched: Case) -> str:
    """Return the name of the file of a launch's reference, in the folder of the case.

    A launch that starts from weights alone has another one.
    """
    return "reference.npz" if launched.model_of is None else "reference_model_only.npz"


def _reference(folder: Path, launched: Case) -> ReferenceRun:
    """Return the stored reference of a launch. Raises EvidenceError."""
    return load_stored(folder / reference_file(launched), ReferenceRun)


def _golden_or_problem(launched: Case) -> tuple[golden.Golden | None, str]:
    """Return (the accepted golden, ""), or (None, the reason why there is none)."""
    try:
        return golden.load_golden(launched), ""
    except golden.GoldenError as error:
        return None, str(error)


def load_case(folder: Path) -> tuple[Case, dict[str, TrainerTraits]]:
    """Return the requested case, and the trainer's traits by name of launch, as `harness run` stored them.

    Raises EvidenceError.
    """
    case = _read_json_file(folder / CASE_FILE, loading.from_json)

    def of_every_launch(record: dict[str, Any]) -> dict[str, TrainerTraits]:
        """Return the traits by launch. Raises ValueError if the record lacks a launch."""
        if missing := sorted(case.launches.keys() - record.keys()):
            raise ValueError(f"nothing of {', '.join(missing)}")
        return {name: traits.from_json(record[name]) for name in case.launches}

    return case, _read_json_file(folder / TRAITS_FILE, of_every_launch)


def _read_json_file(path: Path, build: Callable[[Any], T]) -> T:
    """Return what `build` makes of a JSON file that `harness run` wrote beside the launches.

    Raises EvidenceError, with what to do, if it is missing, damaged, or not of this version.
    """
    with reading_evidence(path, RUN_AGAIN, missing="a folder that `harness run` wrote is wanted, of a run that ended"):
        plain = read_json(path)
        try:
            return build(plain)
        except CaseError as error:
            raise EvidenceError(f"{path}: not a case of this version of the harness ({error}); run it again") from error


# ---- context parallelism that cuts a microbatch's samples as one row


def recut_by_sample(trial: Trial) -> Trial:
    """Return the trial with tokens, labels and positions cut by cp as the plan expects: each sample alone.

    A trial without cp, or whose trainer does not cut a microbatch's samples as one row, is returned unchanged.
    """
    if trial.case.dims.cp == 1 or not trial.traits.cp_cuts_rows:
        return trial
    repeat = None if trial.repeat is None else _recut_run(trial, trial.repeat)
    return replace(trial, run=_recut_run(trial, trial.run), repeat=repeat)


def _recut_run(trial: Trial, run: Run) -> Run:
    """Return the run with the samples of every cp group cut again. A group of which a rank is missing stays as it is."""
    ranks = dict(run.ranks)
    for cp_group in trial.plan.groups["cp"]:
        if all(rank in ranks for rank in cp_group):
            for rank, steps in _recut_steps(trial.case, {rank: ranks[rank] for rank in cp_group}).items():
                ranks[rank] = replace(ranks[rank], steps=steps)
    return replace(run, ranks=ranks)


def _recut_steps(case: Case, line: Mapping[int, RankEvidence]) -> dict[int, tuple[StepEvidence, ...]]:
    """Return, by rank of a cp group, its steps with the samples cut again.

    Steps that not all of the ranks have are dropped. line: the evidence of the group's ranks.
    """
    recut_steps: dict[int, list[StepEvidence]] = {rank: [] for rank in line}
    for steps_of_ranks in zip(*(evidence.steps for evidence in line.values()), strict=False):
        steps = dict(zip(line, steps_of_ranks, strict=True))
        length = case.seq_len(steps_of_ranks[0].step)
        microbatches = _recut_microbatches(case, {rank: step.microbatches for rank, step in steps.items()}, length)
        evaluated = _recut_microbatches(
            case, {rank: step.evaluated for rank, step in steps.items()}, case.training.seq_len
        )
        token_positions = _recut_positions(case, {rank: step.positions for rank, step in steps.items()}, length)
        for rank, step in steps.items():
            recut_step = replace(
                step,
                microbatches=microbatches[rank],
                positions=token_positions[rank],
                evaluated=evaluated[rank],
            )
            recut_steps[rank].append(recut_step)
    return {rank: tuple(steps) for rank, steps in recut_steps.items()}


def _recut_microbatches(
    case: Case, parts: Mapping[int, Sequence[Microbatch]], length: int
) -> dict[int, tuple[Microbatch, ...]]:
    """Return, by rank of a cp group, its microbatches with tokens and labels rejoined across the ranks and cut again.

    length: positions of a sample. They are cut so that each rank has its positions of each sample. Arrays that do not fit
    stay as they are. Microbatches that not all of the ranks have stay as they are, behind the others.
    """
    recut: dict[int, list[Microbatch]] = {rank: [] for rank in parts}
    for microbatches in zip(*parts.values(), strict=False):
        by_rank = dict(zip(parts, microbatches, strict=True))
        tokens = _recut_arrays(case, {rank: microbatch.tokens for rank, microbatch in by_rank.items()}, length)
        labels = _recut_arrays(case, {rank: microbatch.labels for rank, microbatch in by_rank.items()}, length)
        for rank, microbatch in by_rank.items():
            recut[rank].append(replace(microbatch, tokens=tokens[rank], labels=labels[rank]))
    return {rank: (*recut[rank], *parts[rank][len(recut[rank]) :]) for rank in parts}


def _recut_positions(
    case: Case, arrays: Mapping[int, Sequence[np.ndarray]], length: int
) -> dict[int, tuple[np.ndarray, ...]]:
    """Return, by rank of a cp group, the different positions of a step, cut again.

    Empty for all ranks if they have different numbers of arrays: it is unknown then which arrays are of one microbatch.
    """
    if len({len(rank_arrays) for rank_arrays in arrays.values()}) > 1:
        return dict.fromkeys(arrays, ())
    recut = []
    for arrays_of_ranks in zip(*arrays.values(), strict=True):
        recut.append(_recut_arrays(case, dict(zip(arrays, arrays_of_ranks, strict=True)), length))
    arrays_of_rank: dict[int, tuple[np.ndarray, ...]] = {}
    for rank in arrays:
        arrays_of_rank[rank] = tuple(by_rank[rank] for by_rank in recut)
    return arrays_of_rank


def _recut_arrays(case: Case, arrays: Mapping[int, Any], length: int) -> dict[int, Any]:
    """Return, by rank of a cp group, its positions of each sample, [samples, positions].

    arrays: by rank, the part that it cut from all samples in one row, or None. length: positions of a sample. If an
    array is None, or sizes do not fit, all are returned as they are.
    """
    sizes = {-1 if array is None else array.size for array in arrays.values()}
    row_size = sizes.pop() * len(arrays)
    pieces = 2 * len(arrays) if case.features.cp_load_balance else len(arrays)
    if sizes or row_size <= 0 or row_size % length or row_size % pieces:
        return dict(arrays)
    row = np.empty(row_size, dtype=np.int64)
    for rank, array in arrays.items():
        row[token_positions_of_rank(case, rank, row_size)] = array.reshape(-1)
    samples = row.reshape(-1, length)
    return {rank: samples[:, token_positions_of_rank(case, rank, length)] for rank in arrays}
