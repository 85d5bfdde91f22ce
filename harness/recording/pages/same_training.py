"""Text and data on two recordings that are judged to be the same training or not."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

from harness.core.evidence.text import count_text
from harness.core.judge.result import Result, Verdict
from harness.core.report.cause_text import diagnosis_line, evidence_rows
from harness.core.report.documents import shown_result_data
from harness.core.report.finding_text import findings_text
from harness.core.report.text import label_lines, wrap_text
from harness.recording.judged.judge_same_training import SameTraining

CHECK_SUBJECTS = {
    "initial_weights": "weights before training",
    "samples": "rows of samples of each step",
    "recipe": "optimizers and learning rates",
    "gradients": "gradients that the optimizer received",
    "grad_norm": "norm that gradients are clipped by",
    "optimizer_state": "state of the optimizer",
    "update": "what each step adds to the weights",
}
RESUMED_SUBJECT = "weights that it goes on from"
"""Instead of those before training, of a resumed job."""
SUBJECT_WIDTH = max(map(len, CHECK_SUBJECTS.values())) + 2
"""Columns of a check's name."""
LINE_WIDTH = 100
"""Columns of a line."""
MOST_FINDINGS = 3
"""Findings that are shown."""


def same_training_text(judgement: SameTraining) -> str:
    """Return the page: the verdict, its cause, a line for each check, and how bounds came about.

    The first MOST_FINDINGS findings of the check that the cause explains are listed.
    """
    steps = judgement.comparison.steps
    scope = str(len(steps))
    if len(steps) < judgement.recorded:
        scope += f" of {judgement.recorded}"
    scope += " step" if max(len(steps), judgement.recorded) == 1 else " steps"
    if judgement.comparison.after:
        scope += f" after step {judgement.comparison.after}"
    scope += ", "
    if judgement.common < judgement.parameters:
        scope += f"{judgement.common} of "
    scope += count_text(judgement.parameters, "parameter")
    lines = [f"{verdict_of(judgement)}    {judgement.candidate} against {judgement.baseline}: {scope}"]
    if judgement.diagnosis is not None:
        lines += wrap_text(diagnosis_line(judgement.diagnosis), "  ", "  ")
        lines += label_lines(evidence_rows(judgement.diagnosis.evidence))
    if judgement.unproven:
        lines += wrap_text(judgement.unproven, "  ", "  ")
    lines.append("")
    for result in judgement.comparison.results:
        lines += _check_lines(result, judgement.comparison.after)
    first = next((result for result in judgement.comparison.results if _is_first_explained(judgement, result)), None)
    if first:
        lines += ["", *findings_text(replace(first, findings=first.findings[:MOST_FINDINGS]), "  ")]
    return "\n".join([*lines, "", *wrap_text(f"bounds: {judgement.comparison.bounds.how}", "", "  ")])


def _is_first_explained(judgement: SameTraining, result: Result) -> bool:
    return judgement.diagnosis is not None and result.check == judgement.diagnosis.causes[0].explains[0]


def _check_lines(result: Result, after: int) -> list[str]:
    """Return the lines on a check: its verdict, what it is about, and how many were compared or differ, or its note.

    after: the step that a job resumed from, 0 for none.
    """
    text = result.note
    if result.verdict is Verdict.FAIL:
        text = f"{len(result.findings)} of {max(result.examined, len(result.findings))} differ"
    elif result.verdict is Verdict.PASS and not text:
        distance_text = "" if result.largest is None else f", at most {result.largest:.1e} apart"
        text = f"{result.examined} compared{distance_text}"
    subject = RESUMED_SUBJECT if after and result.check == "initial_weights" else CHECK_SUBJECTS[result.check]
    head = f"  {result.verdict:<14} {subject:<{SUBJECT_WIDTH}}"
    indent = 17 + SUBJECT_WIDTH
    first, *rest = textwrap.wrap(text, max(LINE_WIDTH - indent, 30), break_long_words=False, break_on_hyphens=False)
    return [head + first, *(" " * indent + line for line in rest)]


def verdict_of(judgement: SameTraining) -> Verdict:
    """Return the verdict of all checks; UNKNOWN in place of PASS for jobs that did not end well, which prove nothing."""
    verdict = judgement.comparison.verdict
    return Verdict.UNKNOWN if judgement.unproven and verdict is Verdict.PASS else verdict


def same_training_document(judgement: SameTraining) -> dict[str, Any]:
    """Return the judgement as data for JSON, with the results that are shown."""
    diagnosis = judgement.diagnosis
    return {
        "one": judgement.baseline,
        "other": judgement.candidate,
        "verdict": verdict_of(judgement),
        "cause": diagnosis.causes[0] if diagnosis is not None else None,
        "text": diagnosis_line(diagnosis),
        "diagnosis": diagnosis,
        "steps": judgement.comparison.steps,
        "parameters": judgement.parameters,
        "bounds": judgement.comparison.bounds.how,
        "largest": judgement.comparison.scale,
        "unproven": judgement.unproven,
        "results": shown_result_data(judgement.comparison.results),
    }
