"""A trial, put together from stored evidence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from harness.core.case import loading, traits
from harness.core.case.case import Case, CaseError
from harness.core.case.traits import TrainerTraits
from harness.core.evidence.reading import read_json
from harness.core.evidence.store import CASE_FILE, TRAITS_FILE, EvidenceError, load, load_run
from harness.core.judge import golden
from harness.core.judge.order import flattened
from harness.core.judge.row_cuts import by_sample
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
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
