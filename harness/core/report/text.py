"""Text on judgements: the cause first, then the evidence, then every check; and the commands that run a case again."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.case import case_files, declared_traits, usual_trainer
from harness.core.case.repository import path_from_here
from harness.core.case.trainer_spec import TrainerSpec
from harness.core.causes import declarable
from harness.core.checks import check_sentence
from harness.core.evidence.text import count_text
from harness.core.judge.result import Firing, Result, Verdict
from harness.core.report.cause_text import diagnosis_line, evidence_rows
from harness.core.report.finding_text import findings_text
from harness.reference.config import TrainingConfig

if TYPE_CHECKING:
    from harness.core.judge.judgement import Judgement

Rows = list[tuple[str, str]]
"""Label and text."""
WIDTH = 100  # columns of a terminal
INDENT = " " * 20  # below a label and the text beside it
ORDER_OF_VERDICTS = [Verdict.FAIL, Verdict.UNKNOWN, Verdict.XFAIL, Verdict.PASS, Verdict.NOT_APPLICABLE]
"""In which order checks are listed: what needs a look comes first."""
MARKS = {Verdict.PASS: "P", Verdict.FAIL: "F", Verdict.UNKNOWN: "?", Verdict.NOT_APPLICABLE: "-"}


def headline(judgement: Judgement) -> str:
    """Return verdict, case and cause in one line: "FAIL hsdp_2x2 HSDP ran as FSDP: .."."""
    return "    ".join(text for text in (_title(judgement), cause_text(judgement)) if text)


def _headline_lines(judgement: Judgement) -> list[str]:
    """Return the headline as one line; where it is wider than a terminal, the cause is on lines below."""
    line = headline(judgement)
    if len(line) <= WIDTH:
        return [line]
    return [_title(judgement), *wrap_text(cause_text(judgement), "  ")]


def _title(judgement: Judgement) -> str:
    """Return "FAIL hsdp_2x2+FAULT", the verdict and the case, with the fault's name if one was planted."""
    fault = f"+{judgement.fault.rpartition(':')[2]}" if judgement.fault else ""
    return f"{judgement.verdict} {judgement.case.name}{fault}"


def cause_text(judgement: Judgement) -> str:
    """Return in one line the cause of a verdict, and the expectation of the case. Empty if nothing is wrong."""
    cause = diagnosis_line(judgement.diagnosis) or _cause_of_unknown(judgement)
    return " ".join(text for text in (cause, _expectation_text(judgement)) if text)


def wrap_text(text: str, indent: str, continuation: str = "") -> list[str]:
    """Return a text as lines that fit a terminal. Words are never cut.

    continuation: additional indentation of all lines but the first.
    """
    fill = textwrap.TextWrapper(
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + continuation,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return fill.wrap(text)


def _expectation_text(judgement: Judgement) -> str:
    """Return in brackets what the case expects to fail by, and the remedy if it did not.

    Empty without an expected failure.
    """
    expected = judgement.expected_failure
    if expected is None:
        return ""
    if judgement.verdict is Verdict.XFAIL:
        return f"(expected: {expected.because.rstrip('.')}; see {expected.script})"
    remedy = (
        f"if {expected.script} passes too, take expected_failure out of {case_files.shown_path(judgement.case.file)}"
    )
    raised = f" and raise {expected.raised!r}" if expected.raised else ""
    return f"(expected to fail by {expected.checks}, cause {expected.named!r}{raised}: {remedy})"


def case_report(judgement: Judgement) -> str:
    """Return the report of a judged case: headline, evidence, a line for each check, findings.

    If a fault was planted, a line says whether it was missed, did not run, or could not be judged.
    """
    lines = _headline_lines(judgement)
    if judgement.firing is Firing.FIRED and judgement.verdict is Verdict.PASS:
        lines.append("  MISSED            the change ran and every check passes")
    if judgement.firing is Firing.FIRED and judgement.verdict is Verdict.UNKNOWN:
        lines.append("  RAN               the change ran and no check fails; not every check could be judged")
    if judgement.firing is Firing.NOT_FIRED:
        lines.append("  UNFIRED           the change ran on no rank: this run proves nothing about it")
    if judgement.diagnosis:
        lines += label_lines(evidence_rows(judgement.diagnosis.evidence))
        lines += _unwrapped_lines([("again", rerun_command(judgement)), ("evidence", str(judgement.folder))])
    lines += label_lines(
        [("observed", f"{text}; neither the case nor the adapter declares them") for text in judgement.observed]
    )
    if judgement.case.traits:
        lines += _unwrapped_lines([("declared", declared_traits.declaration(judgement.case.traits))])
    lines += [*_replaced_lines(judgement), "", *_check_lines(judgement.results)]
    for result in judgement.results:
        if result.findings:
            lines += ["", f"  {result.check}: {check_sentence(result.check)}"]
            lines += findings_text(result, "    ")
    return "\n".join(lines)


def _replaced_lines(judgement: Judgement) -> list[str]:
    return label_lines([("replaced", text) for text in judgement.replaced])


def rerun_command(judgement: Judgement) -> str:
    """Return the `harness run` command that runs the case again, as it is typed in this folder.

    It has seed and dtype only for a case without a file.
    """
    recipe = judgement.case.training
    defaults = TrainingConfig()
    file, colon, name = (judgement.fault or "").rpartition(":")
    options = {"fault": f"{path_from_here(file)}:{name}" if colon else name}
    if not judgement.case.file:
        if recipe.seed != defaults.seed:
            options["seed"] = str(recipe.seed)
        if recipe.dtype != defaults.dtype:
            options["dtype"] = recipe.dtype
    words = []
    for key, value in (options | _unusual_options(judgement)).items():
        if value:
            words += [f"--{key}", value]
    if torchrun_args := judgement.made.get("torchrun-args"):
        words.append(f"--torchrun-args={torchrun_args}")
    cases = case_files.cases_arguments(judgement.case.file)
    if folder := judgement.made.get("cases"):
        cases = case_files.folder_arguments(Path(folder))
    return shlex.join(["harness", "run", judgement.case.name, *cases, *_trainer_options(judgement), *words])


def pytest_command(judgement: Judgement) -> str:
    """Return the pytest command that runs the case again, with the marker of its tier and the options that were not
    usual."""
    tier = judgement.case.tier
    marker = ["-m", f"harness_{tier}"] if tier != "default" else []
    options = dict(zip(("trainer",), _trainer_options(judgement)[1:], strict=False)) | _unusual_options(judgement)
    words = (f"--harness-{key}={value}" for key, value in options.items() if value)
    return shlex.join(["pytest", "-k", judgement.case.name, *marker, *words])


def _trainer_options(judgement: Judgement) -> list[str]:
    return usual_trainer.trainer_arguments(TrainerSpec.parse(judgement.trainer).name)


def _unusual_options(judgement: Judgement) -> dict[str, str]:
    """Return the options that all commands share and that were not the usual ones, by name; some values may be empty."""
    source = TrainerSpec.parse(judgement.trainer).source
    options = {"source": source and path_from_here(source)}
    options |= {key: judgement.made.get(key, "") for key in ("device", "launcher", "ranks-per-gpu", "timeout")}
    return {key: value for key, value in options.items() if value not in ("cpu", "local")}


def provenance_text(judgements: Sequence[Judgement]) -> str:
    """Return "evidence of DATE to DATE; torch 2.15.0; commit abc (3 cases), unknown (1 cases)" on stored evidence.

    A folder may hold evidence of several runs. What was not recorded is "unknown"; without dates these are left out.
    """
    runs = [judgement.made for judgement in judgements]
    started = sorted({run["started"] for run in runs if run.get("started")})
    texts = []
    if started:
        dates = dict.fromkeys((started[0], started[-1]))
        texts.append(f"evidence of {' to '.join(dates)}")
    for key in ("torch", "commit"):
        counts = Counter(run.get(key) or "unknown" for run in runs)
        values = [f"{value} ({count} cases)" if len(counts) > 1 else value for value, count in counts.items()]
        texts.append(f"{key} {', '.join(values)}")
    return "; ".join(texts)


def check_text(judgement: Judgement, result: Result) -> str:
    """Return the text of one check that did not pass, for a test runner: cause, evidence, findings, and how to run the
    case again.

    Its summary shows the first line, cut: the cause.
    """
    lines: list[str] = []
    if judgement.diagnosis:
        lines += [cause_text(judgement), *label_lines(evidence_rows(judgement.diagnosis.evidence))]
    check = f"{result.check} {result.verdict}"
    if result.note and not result.findings:
        check += f": {result.note}"
    lines.append(check)
    lines += findings_text(result, "  ")
    lines += _replaced_lines(judgement)
    lines += _unwrapped_lines([("again", pytest_command(judgement)), ("evidence", str(judgement.folder))])
    return "\n".join(lines)


def _cause_of_unknown(judgement: Judgement) -> str:
    """Return the first check that could not be judged, and why; empty unless the verdict is UNKNOWN."""
    unknown = [result for result in judgement.results if result.verdict is Verdict.UNKNOWN]
    return f"{unknown[0].check}: {unknown[0].note}" if judgement.verdict is Verdict.UNKNOWN and unknown else ""


def label_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return (label, text) rows as lines. Consecutive rows with one label show it once.

    An observed value is below the expected one if both do not fit on a line. The YAML to declare something is never
    wrapped.
    """
    lines: list[str] = []
    label_before = None
    for label, text in rows:
        if label == declarable.IF_INTENDED:
            lines += _unwrapped_lines([(label, text)])
            label_before = label
            continue
        wrapped_lines: list[str] = []
        for part in _fitting_lines(text):
            wrapped_lines += wrap_text(part, INDENT, "  ")
        first, *rest = wrapped_lines or [INDENT]
        lines += [_label_line("" if label == label_before else label, first[len(INDENT) :]), *rest]
        label_before = label
    return lines


def _fitting_lines(text: str) -> list[str]:
    """Return the lines of a text; a line that does not fit beside a label is split at three blanks."""
    room = WIDTH - len(INDENT)
    parts: list[str] = []
    for line in text.splitlines():
        if len(line) <= room:
            parts.append(line)
        else:
            parts += line.split("   ")
    return parts


def _unwrapped_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return rows of commands and paths, each whole on its line, so that a person can copy it."""
    return [_label_line(label, text) for label, text in rows]


def _label_line(label: str, text: str) -> str:
    return f"  {label:<16}  {text}"


def _check_lines(results: Sequence[Result]) -> list[str]:
    """Return a line for each check, those that fail first, then those that could not be judged.

    More than two checks that could not be judged for the same reason share a line, at the end.
    """
    reasons = [result.note for result in results if result.verdict is Verdict.UNKNOWN]
    shared = {note for note in reasons if note and reasons.count(note) > 2}
    ordered = sorted(results, key=lambda result: ORDER_OF_VERDICTS.index(result.verdict))
    own_lines = (result for result in ordered if result.verdict is not Verdict.UNKNOWN or result.note not in shared)
    lines = [check_line(result) for result in own_lines]
    return lines + [
        f"  {f'{reasons.count(note)} other checks':<17} {Verdict.UNKNOWN:<14}  {note}" for note in sorted(shared)
    ]


def check_line(result: Result) -> str:
    """Return the line of a check: verdict, number of comparisons and of findings, largest difference, note.

    Each of these if there is one.
    """
    examined = f"{result.examined} examined" if result.examined else ""
    findings = count_text(len(result.findings), "finding") if result.findings else ""
    largest = "" if result.largest is None else f"largest difference {result.largest:.1e}"
    detail = ", ".join(text for text in (examined, findings, largest, result.note) if text)
    return f"  {result.check:<17} {result.verdict:<14}  {detail}"
