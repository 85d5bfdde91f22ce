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
from harness.core.judge.result import Result, Verdict
from harness.core.judge.trial import Trial, launch_label

STAGES = ("process", "structure", "data", "numbers")


@functools.cache
def all_checks() -> dict[str, ModuleType]:
    """Every check by name, in the order of display."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    modules = {name: _complete(importlib.import_module(f"{__name__}.{name}")) for name in names}
    return dict(sorted(modules.items(), key=lambda item: (STAGES.index(item[1].STAGE), item[0])))


def _complete(module: ModuleType) -> ModuleType:
    """Return it. Raises CheckError for a file that is no check, with all that it lacks."""
    needs = getattr(module, "NEEDS", None)
    lacking = {
        "a docstring, whose first sentence is the check": not module.__doc__,
        f"STAGE, one of {', '.join(STAGES)}": getattr(module, "STAGE", None) not in STAGES,
        f"NEEDS, a frozenset of words, of {', '.join(WORDS)}": not isinstance(needs, frozenset) or needs - {*WORDS},
        "a function check(trial)": not callable(getattr(module, "check", None)),
    }
    if missing := [what for what, lacks in lacking.items() if lacks]:
        raise CheckError(f"{module.__file__}: not a check; it lacks {'; '.join(missing)}")
    return module


def judging(provided: Provided) -> frozenset[str]:
    """Return the checks that judge evidence of a kind that provides this."""
    return frozenset(name for name, module in all_checks().items() if provided.lack(module.NEEDS) is None)


def statement(name: str) -> str:
    """The check in one sentence: the first line of the file's docstring."""
    return (all_checks()[name].__doc__ or "").strip().splitlines()[0]


def judge(trial: Trial) -> tuple[Result, ...]:
    """In a case that resumes, every check passes only if it passes for each of its launches."""
    return tuple(
        _of_all_launches(trial, [run_check(name, module.check, launch) for launch in trial.launches])
        for name, module in all_checks().items()
    )


def _of_all_launches(trial: Trial, results: list[Result]) -> Result:
    """The worst verdict, what was examined altogether, and the findings, which say in which launch."""
    order = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS, Verdict.NOT_APPLICABLE)
    worst = min((result.verdict for result in results), key=order.index)
    findings = [
        replace(finding, launch=launch_label(launch))
        for launch, result in zip(trial.launches, results, strict=True)
        for finding in result.findings
    ]
    telling = [(launch, r) for launch, r in zip(trial.launches, results, strict=True) if r.verdict is worst][-1]
    note = (
        telling[1].note
        if worst is not Verdict.UNKNOWN
        else ": ".join(filter(None, (launch_label(telling[0]), telling[1].note)))
    )
    largest = max((r.largest for r in results if r.largest is not None), default=None)
    return Result(results[0].check, worst, sum(r.examined for r in results), tuple(findings), note, largest)


def run_check(name: str, check: Callable[[Trial], Result], trial: Trial) -> Result:
    """The check's result, made honest: judged if what it needs is there, and passed if something was examined."""
    provided, needs = trial.provided, all_checks()[name].NEEDS
    if lack := provided.lack(needs):
        return Result(name, Verdict.UNKNOWN if lack.unknown else Verdict.NOT_APPLICABLE, note=lack.why)
    try:
        result = check(trial)
        if getattr(result, "check", None) != name:
            raise TypeError(f"it returned {result!r:.60}, no Result named {name!r}")
    except tolerance.NoBound as reason:
        return Result(name, Verdict.UNKNOWN, note=f"no bound: {reason}")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = ([one for one in frames if one.filename.endswith(f"{name}.py")] or frames)[-1]
        place = f"{where.name} ({where.filename.rpartition('/')[2]}:{where.lineno})"
        return Result(name, Verdict.UNKNOWN, note=f"the check itself raised {error!r} in {place}")
    if result.verdict is not Verdict.PASS:
        return result
    if doubt := provided.doubt(needs):
        return replace(result, verdict=Verdict.UNKNOWN, note=doubt)
    return result if result.examined else Result(name, Verdict.UNKNOWN, note="nothing was examined")
