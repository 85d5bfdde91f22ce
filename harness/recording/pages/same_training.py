"""Whether two recordings are the same training, for a person and as data."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

from harness.core.evidence.text import counted
from harness.core.judge.result import Result, Verdict
from harness.core.report.cause_text import cause_line
from harness.core.report.documents import shown_results
from harness.core.report.finding_text import findings_text
from harness.core.report.text import wrapped
from harness.recording.judged.judge_same_training import SameTraining

WORDS = {
    "initial_weights": "weights before training",
    "samples": "rows of samples of each step",
    "recipe": "optimizers and learning rates",
    "gradients": "gradients that the optimizer received",
    "grad_norm": "norm that gradients are clipped by",
    "optimizer_state": "state of the optimizer",
    "update": "what each step adds to the weights",
}
AFTER = "weights that it goes on from"
"""Instead of those before training, of a resumed job."""
WIDTH, COLUMNS, FEW = max(map(len, WORDS.values())) + 2, 100, 3
"""Columns of a check's name and of a line, and how many findings are shown."""


def same_training(found: SameTraining) -> str:
    """Return the verdict, its cause, and a line for each check; findings of the check that fails first."""
    steps = found.comparison.steps
    only, count = f" of {found.recorded}" * (len(steps) < found.recorded), max(len(steps), found.recorded)
    after = f" after step {found.comparison.after}" * bool(found.comparison.after)
    named = f"{found.common} of " * (found.common < found.parameters) + counted(found.parameters, "parameter")
    of = f"{len(steps)}{only} step{'s' * (count != 1)}{after}, {named}"
    lines = [f"{verdict_of(found)}    {found.other} against {found.one}: {of}"]
    lines += wrapped(cause_line(found.cause), "  ", "  ") if found.cause is not None else []
    lines += wrapped(found.unproven, "  ", "  ") if found.unproven else []
    lines += ["", *(line for result in found.comparison.results for line in _row(result, found.comparison.after))]
    first = next((one for one in found.comparison.results if _is_first(found, one)), None)
    lines += ["", *findings_text(replace(first, findings=first.findings[:FEW]), "  ")] if first else []
    return "\n".join([*lines, "", *wrapped(f"bounds: {found.comparison.noise}", "", "  ")])


def _is_first(found: SameTraining, result: Result) -> bool:
    return bool(result.findings) and found.cause is not None and result.check == found.cause.explains[0]


def _row(result: Result, after: int) -> list[str]:
    """Return a check's verdict, what it is about, and what was seen."""
    text = result.note
    if result.verdict is Verdict.FAIL:
        text = f"{len(result.findings)} of {max(result.examined, len(result.findings))} differ"
    elif result.verdict is Verdict.PASS and not text:
        apart = "" if result.largest is None else f", at most {result.largest:.1e} apart"
        text = f"{result.examined} compared{apart}"
    words = AFTER if after and result.check == "initial_weights" else WORDS[result.check]
    head, space = f"  {result.verdict:<14} {words:<{WIDTH}}", 17 + WIDTH
    first, *more = textwrap.wrap(text, max(COLUMNS - space, 30), break_long_words=False, break_on_hyphens=False)
    return [head + first, *(" " * space + line for line in more)]


def verdict_of(found: SameTraining) -> Verdict:
    """Return the verdict; a job that did not end well proves nothing."""
    verdict = found.comparison.verdict
    return Verdict.UNKNOWN if found.unproven and verdict is Verdict.PASS else verdict


def as_document(found: SameTraining) -> dict[str, Any]:
    """Return the same as data."""
    cause = found.cause
    return {
        "one": found.one,
        "other": found.other,
        "verdict": verdict_of(found),
        "cause": cause,
        "text": cause_line(cause) if cause is not None else "",
        "steps": found.comparison.steps,
        "parameters": found.parameters,
        "bounds": found.comparison.noise,
        "largest": found.comparison.scale,
        "unproven": found.unproven,
        "results": shown_results(found.comparison.results),
    }
