"""Judgements as a person reads them: the cause first, then the evidence, then every check."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.case import case_files, declared_traits, usual_trainer
from harness.core.case.repository import from_here
from harness.core.case.trainer_spec import TrainerSpec
from harness.core.causes import declarable
from harness.core.checks import statement
from harness.core.judge.result import Result, Verdict
from harness.core.report.cause_text import diagnosis_line, evidence_rows
from harness.core.report.finding_text import findings_text
from harness.reference.config import TrainingConfig

if TYPE_CHECKING:
    from harness.core.judge.judgement import Judgement

Rows = list[tuple[str, str]]
"""Label and text."""
WIDTH = 100  # columns of a terminal
INDENT = " " * 20  # below a label and the text beside it
MARKS = {Verdict.PASS: "P", Verdict.FAIL: "F", Verdict.UNKNOWN: "?", Verdict.NOT_APPLICABLE: "-"}


def headline(judgement: Judgement) -> str:
    """All in one line: verdict, case, cause."""
    return "    ".join(text for text in (_title(judgement), cause_text(judgement)) if text)


def _head(judgement: Judgement) -> list[str]:
    """The headline; where a terminal is too narrow for it the cause goes below."""
    line = headline(judgement)
    return [line] if len(line) <= WIDTH else [_title(judgement), *wrapped(cause_text(judgement), "  ")]


def _title(judgement: Judgement) -> str:
    fault = f"+{judgement.fault.rpartition(':')[2]}" if judgement.fault else ""
    return f"{judgement.verdict} {judgement.case.name}{fault}"


def cause_text(judgement: Judgement) -> str:
    """Say in one line why it is not as expected. Empty if nothing is wrong."""
    cause = diagnosis_line(judgement.diagnosis) or _cause_of_unknown(judgement)
    return " ".join(text for text in (cause, _expectation(judgement)) if text)


def wrapped(text: str, indent: str, more: str = "") -> list[str]:
    """Lines that fit a terminal, all but the first also indented by `more`. What has no blank in it is never cut."""
    fill = textwrap.TextWrapper(
        WIDTH, initial_indent=indent, subsequent_indent=indent + more, break_long_words=False, break_on_hyphens=False
    )
    return fill.wrap(text)


def _expectation(judgement: Judgement) -> str:
    expected = judgement.expected_failure
    if expected is None:
        return ""
    if judgement.verdict is Verdict.XFAIL:
        return f"(expected: {expected.because.rstrip('.')}; see {expected.script})"
    remedy = f"if {expected.script} passes too, take expected_failure out of {case_files.shown(judgement.case.file)}"
    raised = f" and raise {expected.raised!r}" * bool(expected.raised)
    return f"(expected to fail by {expected.checks}, cause {expected.named!r}{raised}: {remedy})"


def case_report(judgement: Judgement) -> str:
    lines = _head(judgement)
    if judgement.fired and judgement.verdict is Verdict.PASS:
        lines.append("  MISSED            the change ran and every check passes")
    if judgement.fired and judgement.verdict is Verdict.UNKNOWN:
        lines.append("  RAN               the change ran and no check fails; not every check could be judged")
    if judgement.fired is False:
        lines.append("  UNFIRED           the change ran on no rank: this run proves nothing about it")
    if judgement.diagnosis:
        lines += table(evidence_rows(judgement.diagnosis.evidence))
        lines += _to_copy([("again", command(judgement)), ("evidence", str(judgement.folder))])
    lines += table(
        [("observed", f"{text}; neither the case nor the adapter declares them") for text in judgement.observed]
    )
    if judgement.case.traits:
        lines += _to_copy([("declared", declared_traits.declaration(judgement.case.traits))])
    lines += [*_replaced(judgement), "", *_check_lines(judgement.results)]
    for result in judgement.results:
        if result.findings:
            lines += ["", f"  {result.check}: {statement(result.check)}"]
            lines += findings_text(result, "    ")
    return "\n".join(lines)


def _replaced(judgement: Judgement) -> list[str]:
    return table([("replaced", text) for text in judgement.replaced])


def command(judgement: Judgement) -> str:
    """Return the command that shows it again, as it is typed in this folder."""
    recipe, usual = judgement.case.training, TrainingConfig()
    file, colon, name = (judgement.fault or "").rpartition(":")
    given = {"fault": f"{from_here(file)}:{name}" if colon else name}
    if not judgement.case.file:
        given |= {"seed": str(recipe.seed)} if recipe.seed != usual.seed else {}
        given |= {"dtype": recipe.dtype} if recipe.dtype != usual.dtype else {}
    typed = [word for key, value in (given | _how(judgement)).items() if value for word in (f"--{key}", value)]
    nodes = [f"--torchrun-args={value}"] if (value := judgement.made.get("torchrun-args")) else []
    cases, folder = case_files.typed(judgement.case.file), judgement.made.get("cases")
    cases = case_files.typed_folder(Path(folder)) if folder else cases
    return shlex.join(["harness", "run", judgement.case.name, *cases, *_trainer(judgement), *typed, *nodes])


def pytest_command(judgement: Judgement) -> str:
    tier = judgement.case.tier
    marked = ["-m", f"harness_{tier}"] if tier != "default" else []
    given = dict(zip(("trainer",), _trainer(judgement)[1:], strict=False)) | _how(judgement)
    typed = (f"--harness-{key}={value}" for key, value in given.items() if value)
    return shlex.join(["pytest", "-k", judgement.case.name, *marked, *typed])


def _trainer(judgement: Judgement) -> list[str]:
    return usual_trainer.typed(TrainerSpec.parse(judgement.trainer).name)


def _how(judgement: Judgement) -> dict[str, str]:
    """The options, which all commands share, that were not the usual ones."""
    source = TrainerSpec.parse(judgement.trainer).source
    given = {"source": source and from_here(source)}
    given |= {key: judgement.made.get(key, "") for key in ("device", "launcher", "ranks-per-gpu", "timeout")}
    return {key: value for key, value in given.items() if value not in ("cpu", "local")}


def provenance(judgements: Sequence[Judgement]) -> str:
    """When, with which torch and of which commit stored evidence was made: a folder may hold that of several runs."""
    made = [judgement.made for judgement in judgements]
    started = sorted({one["started"] for one in made if one.get("started")})
    lines = [f"evidence of {' to '.join(dict.fromkeys((started[0], started[-1])))}"] if started else []
    for key in ("torch", "commit"):
        found = Counter(one.get(key) or "unknown" for one in made)
        shown = ", ".join(f"{value} ({count} cases)" if len(found) > 1 else value for value, count in found.items())
        lines.append(f"{key} {shown}")
    return "; ".join(lines)


def check_text(judgement: Judgement, result: Result) -> str:
    """What a test runner shows of one check that did not pass. It shows the first line, cut, in its summary: the cause."""
    rows = evidence_rows(judgement.diagnosis.evidence) if judgement.diagnosis else []
    lines = [cause_text(judgement), *table(rows)] if judgement.diagnosis else []
    lines.append(
        f"{result.check} {result.verdict}" + (f": {result.note}" if result.note and not result.findings else "")
    )
    lines += findings_text(result, "  ")
    lines += _replaced(judgement)
    lines += _to_copy([("again", pytest_command(judgement)), ("evidence", str(judgement.folder))])
    return "\n".join(lines)


def _cause_of_unknown(judgement: Judgement) -> str:
    unknown = [result for result in judgement.results if result.verdict is Verdict.UNKNOWN]
    return f"{unknown[0].check}: {unknown[0].note}" if judgement.verdict is Verdict.UNKNOWN and unknown else ""


def table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Rows of one label in a run show it once. What is observed goes below what is expected where both do not fit."""
    lines: list[str] = []
    before = None
    for label, text in rows:
        if label == declarable.LABEL:
            lines += _to_copy([(label, text)])
            continue
        first, *rest = [line for part in _parts(text) for line in wrapped(part, INDENT, "  ")] or [INDENT]
        lines += [_labelled("" if label == before else label, first[len(INDENT) :]), *rest]
        before = label
    return lines


def _parts(text: str) -> list[str]:
    """Its lines; one that does not fit is split at three blanks."""
    room = WIDTH - len(INDENT)
    return [part for line in text.splitlines() for part in ([line] if len(line) <= room else line.split("   "))]


def _to_copy(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Commands and paths, each whole on its line."""
    return [_labelled(label, text) for label, text in rows]


def _labelled(label: str, text: str) -> str:
    return f"  {label:<16}  {text}"


def _check_lines(results: Sequence[Result]) -> list[str]:
    """A line a check; checks that could not be judged for one and the same reason share a line."""
    reasons = [result.note for result in results if result.verdict is Verdict.UNKNOWN]
    shared = {note for note in reasons if reasons.count(note) > 2}
    lines = [check_line(result) for result in results if result.note not in shared]
    return lines + [
        f"  {f'{reasons.count(note)} other checks':<17} {Verdict.UNKNOWN:<14}  {note}" for note in sorted(shared)
    ]


def check_line(result: Result) -> str:
    examined = f"{result.examined} examined" if result.examined else ""
    largest = "" if result.largest is None else f"largest difference {result.largest:.1e}"
    detail = ", ".join(text for text in (examined, largest, result.note) if text)
    return f"  {result.check:<17} {result.verdict:<14}  {detail}"
