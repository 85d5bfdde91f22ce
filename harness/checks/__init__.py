"""The checks. One file each: its docstring is the check, its `check(trial)` judges stored evidence and nothing else.

A file also says its STAGE, which only orders the display. What all checks share is here: a check that raises, or that
examined nothing, has not passed.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

from harness.judge import tolerance
from harness.judge.observed_checks import as_far_as_seen
from harness.judge.result import Result, Verdict
from harness.judge.trial import Recorded, Trial, launch_label

OF_RECORDED = ("completed", "collective_order", "process_groups", "placements", "traffic", "memory", "reshard")
"""What is judged of a job that was only recorded: checks that need neither values nor a recipe."""

OF_PARAMETERS = ("placements", "traffic", "memory", "reshard")
"""What looks at the parameters of all models."""

OF_ALONE = (*OF_RECORDED, "schedule", "features")
"""What is judged of ranks that ran alone, without data: checks that need no values, and no other ranks."""

STAGES = ("process", "structure", "data", "numbers")


@functools.cache
def all_checks() -> dict[str, ModuleType]:
    """Every check by name, in the order of display."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in names}
    return dict(sorted(modules.items(), key=lambda item: (STAGES.index(item[1].STAGE), item[0])))


def statement(name: str) -> str:
    """The check in one sentence: the first line of the file's docstring."""
    return (all_checks()[name].__doc__ or "").strip().splitlines()[0]


def judge(trial: Trial) -> tuple[Result, ...]:
    """Of a case that resumes, every check passes only if it holds for each of its launches."""
    return tuple(
        _of_all_launches(trial, [run_check(name, module.check, launch) for launch in trial.launches])
        for name, module in all_checks().items()
    )


def _of_all_launches(trial: Trial, results: list[Result]) -> Result:
    """The worst verdict, what was examined altogether, and the findings, which say in which launch."""
    order = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS, Verdict.NOT_APPLICABLE)
    worst = min((result.verdict for result in results), key=order.index)
    findings = [
        replace(finding, where=f"{launch_label(launch)}{finding.where}")
        for launch, result in zip(trial.launches, results, strict=True)
        for finding in result.findings
    ]
    telling = [(launch, r) for launch, r in zip(trial.launches, results, strict=True) if r.verdict is worst][-1]
    note = telling[1].note if worst is not Verdict.UNKNOWN else launch_label(telling[0]) + telling[1].note
    return Result(results[0].check, worst, sum(r.examined for r in results), tuple(findings), note)


def run_check(name: str, check: Callable[[Trial], Result], trial: Trial) -> Result:
    """The check's result, made honest."""
    if reason := _not_judged(name, trial):
        return Result(name, Verdict.NOT_APPLICABLE, note=reason)
    if trial.recorded is not None and name in trial.recorded.unknown:
        return Result(name, Verdict.UNKNOWN, note=trial.recorded.unknown[name])
    if trial.recorded is not None and trial.recorded.failed and name != "completed":
        return Result(name, Verdict.UNKNOWN, note=trial.recorded.failed)
    missing = _missing(trial)
    if name != "completed" and missing:
        return Result(name, Verdict.UNKNOWN, note=f"no evidence {missing}; see `completed`")
    try:
        result = check(trial)
    except tolerance.NoBound as reason:
        return Result(name, Verdict.UNKNOWN, note=f"no bound: {reason}")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Result(name, Verdict.UNKNOWN, note=f"the check itself raised {error!r} at {where.name}:{where.lineno}")
    if result.verdict is Verdict.PASS and result.examined == 0:
        return Result(name, Verdict.UNKNOWN, note="nothing was examined")
    return as_far_as_seen(result, trial.recorded.partial) if trial.recorded and name in OF_PARAMETERS else result


def _not_judged(name: str, trial: Trial) -> str:
    """Why a check is not judged of a job that was only recorded, or of ranks that ran alone."""
    if trial.alone is not None:
        return trial.alone.not_judged.get(name, "" if name in OF_ALONE else "needs numbers: ranks alone have no data")
    return "" if trial.recorded is None else _unrecorded(name, trial.recorded)


def _unrecorded(name: str, recorded: Recorded) -> str:
    return recorded.not_judged.get(name, "") if name in OF_RECORDED else "needs a reference: an adapter brings it"


def _missing(trial: Trial) -> str:
    """Whose evidence is lacking: a rank's, some steps of a rank's, or the reference's. Empty if all is there."""
    ranks = [rank for rank in trial.started if rank not in trial.ranks]
    if ranks:
        return f"from {_some(ranks)}"
    wanted = set(trial.case.steps)
    judged_by_it = trial.recorded is None and trial.alone is None
    recorded = {"the reference": {step.step for step in trial.reference.steps}} if judged_by_it else {}
    recorded |= {f"rank {rank}": {step.step for step in trial.ranks[rank].steps} for rank in sorted(trial.ranks)}
    for who, steps in recorded.items():
        lacking = sorted(wanted - steps)
        if lacking:
            return f"from {who} of step {', '.join(map(str, lacking))}"
    return ""


def _some(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks ({', '.join(map(str, ranks[:4]))}...)"
