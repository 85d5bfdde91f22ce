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
from harness.core.evidence.store import CASE_FILE, TRAITS_FILE, EvidenceError, load, load_run
from harness.core.judge import golden
from harness.core.judge.order import flattened
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.core.plan.stages import positions
from harness.reference.record import ReferenceRun

T = TypeVar("T")


def load_trial(folder: Path) -> Trial:
    """Raises EvidenceError if the folder is not one that `harness run` wrote."""
    case, chosen = load_case(folder)
    references = {of.model_of: (_reference(folder, of), *_golden(of)) for of in golden.references(case)}
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
        trials.append(by_sample(flattened(trial)))
    return trials[-1]


def reference_file(launched: Case) -> str:
    """Return the name of the file of a launch's reference, in the folder of the case."""
    return "reference.npz" if launched.model_of is None else "reference_model_only.npz"


def _reference(folder: Path, launched: Case) -> ReferenceRun:
    return load(folder / reference_file(launched), ReferenceRun)


def _golden(launched: Case) -> tuple[golden.Golden | None, str]:
    """Return what is accepted, or why there is nothing."""
    try:
        return golden.load(launched), ""
    except golden.GoldenError as error:
        return None, str(error)


def load_case(folder: Path) -> tuple[Case, dict[str, TrainerTraits]]:
    """What was requested, and by launch what the trainer chose. Raises EvidenceError."""
    case = _read(folder / CASE_FILE, loading.from_json)

    def of_every_launch(record: dict[str, Any]) -> dict[str, TrainerTraits]:
        if missing := sorted(case.launches.keys() - record.keys()):
            raise ValueError(f"nothing of {', '.join(missing)}")
        return {name: traits.from_json(record[name]) for name in case.launches}

    return case, _read(folder / TRAITS_FILE, of_every_launch)


def _read(path: Path, build: Callable[[Any], T]) -> T:
    """What `harness run` wrote beside the launches. Raises EvidenceError."""
    try:
        return build(read_json(path))
    except FileNotFoundError as error:
        wanted = "a folder that `harness run` wrote is wanted, of a run that ended"
        raise EvidenceError(f"{path}: no such file; {wanted}") from error
    except CaseError as error:
        raise EvidenceError(f"{path}: not a case of this version of the harness ({error}); run it again") from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise EvidenceError(f"{path}: damaged ({error}); run the case again") from error


# ---- context parallelism that cuts a microbatch's samples as one row


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
