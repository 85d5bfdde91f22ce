"""The checks. One file each: its docstring is the check, its `check(trial)` judges stored evidence and nothing else.

A file has a STAGE, which only orders the display. Its NEEDS are the words of harness.core.evidence.provided without which it
judges nothing: whether it applies to a kind of evidence follows from these. What all checks share is here: a check that raises,
or that examined nothing, has not passed.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

from harness.core.evidence.errors import CheckError
from harness.core.evidence.provided import WORDS, Provided
from harness.core.judge import tolerance
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, Verdict
from harness.core.judge.trial import Trial, launch_label

STAGES = ("process", "structure", "data", "numbers")


@functools.cache
def all_checks() -> dict[str, ModuleType]:
    """Return the module of every check by name, ordered by stage and then by name.

    Raises CheckError for a file that is no check.
    """
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    modules = {name: _require_complete(importlib.import_module(f"{__name__}.{name}")) for name in names}
    return dict(sorted(modules.items(), key=lambda item: (STAGES.index(item[1].STAGE), item[0])))


def _require_complete(module: ModuleType) -> ModuleType:
    """Return the module of a check unchanged. Raises CheckError for a file that is no check, with all that it lacks."""
    needs = getattr(module, "NEEDS", None)
    lacking = {
        "a docstring, whose first sentence is the check": not module.__doc__,
        f"STAGE, one of {', '.join(STAGES)}": getattr(module, "STAGE", None) not in STAGES,
        f"NEEDS, a frozenset of words, of {', '.join(WORDS)}": not isinstance(needs, frozenset) or needs - {*WORDS},
        "a function check(trial)": not callable(getattr(module, "check", None)),
    }
    if missing := [part for part, is_lacking in lacking.items() if is_lacking]:
        raise CheckError(f"{module.__file__}: not a check; it lacks {'; '.join(missing)}")
    return module


def applicable_checks(provided: Provided) -> frozenset[str]:
    """Return the names of the checks whose needs this kind of evidence provides."""
    return frozenset(name for name, module in all_checks().items() if provided.find_lack(module.NEEDS) is None)


def check_sentence(name: str) -> str:
    """Return the check in one sentence: the first line of the file's docstring."""
    return (all_checks()[name].__doc__ or "").strip().splitlines()[0]


def judge(trial: Trial) -> tuple[Result, ...]:
    """Return the result of every check, in the order of display.

    In a case that resumes, a check passes only if it passes for each of the launches, whose results are merged.
    """
    results = []
    for name, module in all_checks().items():
        results_by_launch = [run_check(name, module.check, launch) for launch in trial.launches]
        results.append(_merge_launch_results(trial, results_by_launch))
    return tuple(results)


def _merge_launch_results(trial: Trial, results: list[Result]) -> Result:
    """Return one result of a check for all launches: the worst verdict, and all findings with their launch's label.

    What was examined is summed. The note is that of the last launch with this verdict. results: in the order of the
    launches.
    """
    order = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS, Verdict.NOT_APPLICABLE)
    worst = min((result.verdict for result in results), key=order.index)
    findings: list[Finding] = []
    for launch, result in zip(trial.launches, results, strict=True):
        findings += [replace(finding, launch=launch_label(launch)) for finding in result.findings]
    with_worst = [
        (launch, launch_result)
        for launch, launch_result in zip(trial.launches, results, strict=True)
        if launch_result.verdict is worst
    ]
    last_launch, last_result = with_worst[-1]
    note = last_result.note
    if worst is Verdict.UNKNOWN:
        note = ": ".join(filter(None, (launch_label(last_launch), last_result.note)))
    largest = max((result.largest for result in results if result.largest is not None), default=None)
    examined = sum(result.examined for result in results)
    return Result(results[0].check, worst, examined, tuple(findings), note, largest)


def run_check(name: str, check: Callable[[Trial], Result], trial: Trial) -> Result:
    """Return the check's result on one launch.

    UNKNOWN or NOT APPLICABLE, with the reason, if the evidence lacks what it needs. UNKNOWN as well if the check raises
    (also NoBound), returns no Result of its name, or passes without having examined anything. A PASS becomes UNKNOWN if
    some of the evidence was seen only in part.
    """
    provided = trial.provided
    needs = all_checks()[name].NEEDS
    if lack := provided.find_lack(needs):
        return Result(name, Verdict.UNKNOWN if lack.unknown else Verdict.NOT_APPLICABLE, note=lack.why)
    try:
        result = check(trial)
        if getattr(result, "check", None) != name:
            raise TypeError(f"it returned {result!r:.60}, no Result named {name!r}")
    except tolerance.NoBound as reason:
        return Result(name, Verdict.UNKNOWN, note=f"no bound: {reason}")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        frames_of_check = [frame for frame in frames if frame.filename.endswith(f"{name}.py")]
        frame = (frames_of_check or frames)[-1]
        location = f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
        return Result(name, Verdict.UNKNOWN, note=f"the check itself raised {error!r} in {location}")
    if result.verdict is not Verdict.PASS:
        return result
    if doubt := provided.reason_of_doubt(needs):
        return replace(result, verdict=Verdict.UNKNOWN, note=doubt)
    return result if result.examined else Result(name, Verdict.UNKNOWN, note="nothing was examined")
