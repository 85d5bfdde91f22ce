"""The outcome of one case of many, in plain values: a row of the grid, and a line of a run's record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.core.case.case import Case
from harness.core.case.dims import AXES
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Verdict
from harness.core.report.as_data import as_data
from harness.core.report.cause_text import diagnosis_line
from harness.core.report.documents import shown_result_data
from harness.core.report.text import case_report, cause_text, rerun_command

GREEN_VERDICTS = (Verdict.PASS, Verdict.XFAIL)
SKIPPED = "SKIPPED"
ERROR = "ERROR"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case: its verdict, or SKIPPED or ERROR."""

    case: str
    verdict: str  # SKIPPED or ERROR if there is none
    ranks: int = 0
    seconds: float = 0.0  # of its launches
    reason: str = ""  # of SKIPPED or ERROR, or of a verdict that no cause explains
    cause: str = ""
    checks: dict[str, str] = field(default_factory=dict)  # the verdict of each
    not_applicable: dict[str, str] = field(default_factory=dict)  # why checks had nothing to say
    replaced: tuple[str, ...] = ()
    report: str = ""  # unless it is PASS or XFAIL
    layout: str = ""  # what was requested, in words
    recipe: str = ""  # likewise
    folder: str = ""  # the name of the one with the evidence
    again: str = ""  # the command that runs it again
    measures: dict[str, float] = field(default_factory=dict)  # what it took (`judge.measures`)
    gpu: str = ""  # its name; empty on CPU
    made_again: str = ""  # why it was made a second time
    repeats: dict[str, Any] = field(default_factory=dict)  # of a failing case: what became of it when it was made again
    tokens: int = 0  # of a step; 0 if not recorded
    results: list[dict[str, Any]] = field(default_factory=list)  # unless it is PASS or XFAIL: checks' first findings
    diagnosis: dict[str, Any] = field(default_factory=dict)  # unless it is PASS or XFAIL

    @property
    def skipped(self) -> bool:
        return self.verdict == SKIPPED

    @property
    def failed(self) -> bool:
        """Return whether the case is neither green nor skipped: a check fails, something could not be judged, or it is
        an ERROR."""
        return not self.skipped and self.verdict not in GREEN_VERDICTS


def judged_outcome(judgement: Judgement) -> Outcome:
    """Return the outcome of a case that was judged. The report, results and diagnosis of a green one are empty."""
    results = judgement.results
    green = judgement.verdict in GREEN_VERDICTS
    return Outcome(
        judgement.case.name,
        str(judgement.verdict),
        **_fields_of_case(judgement.case),
        seconds=round(judgement.seconds, 3),
        cause=diagnosis_line(judgement.diagnosis),
        reason="" if judgement.diagnosis else cause_text(judgement),
        checks={result.check: str(result.verdict) for result in results},
        not_applicable={result.check: result.note for result in results if result.verdict is Verdict.NOT_APPLICABLE},
        replaced=tuple(judgement.replaced),
        made_again=judgement.made.get("again", ""),
        report="" if green else case_report(judgement),
        results=[] if green else shown_result_data(results),
        diagnosis={} if green or judgement.diagnosis is None else as_data(judgement.diagnosis),
        folder=judgement.folder.name,
        again=rerun_command(judgement),
        measures=judgement.measures,
        gpu=judgement.gpu,
    )


def skipped_outcome(case: Case, reason: str) -> Outcome:
    """Return the outcome of a case that was not run, with verdict SKIPPED."""
    return Outcome(case.name, SKIPPED, **_fields_of_case(case), reason=reason)


def error_outcome(case: Case, reason: str) -> Outcome:
    """Return the outcome of a case that could not be run or judged, with verdict ERROR."""
    return Outcome(case.name, ERROR, **_fields_of_case(case), reason=reason)


def _fields_of_case(case: Case) -> dict[str, Any]:
    """Return the fields of an Outcome that the case alone determines: ranks, layout, tokens and recipe."""
    recipe = case.training
    model = case.model.name
    degrees = [f"{axis} {degree}" for axis, degree in zip(AXES, case.dims.degrees, strict=True) if degree > 1]
    return {
        "ranks": largest_world_size(case),
        "layout": ", ".join(degrees) or "one rank",
        "tokens": recipe.global_batch * recipe.seq_len,
        "recipe": f"{model}, {recipe.global_batch} x {recipe.seq_len} tokens, {recipe.dtype}, {recipe.optimizer}",
    }


def largest_world_size(case: Case) -> int:
    """Return the number of ranks of a case's largest launch."""
    return max(launched.dims.world_size for launched in case.launches.values())


VERDICTS = frozenset({*map(str, Verdict), SKIPPED, ERROR})
TYPES_BY_NAME: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "dict": dict,
    "list": list,
    "tuple": (list, tuple),
}


def _check_fields(value: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if these are not the fields of an Outcome, as outcome_from_json does."""
    for field_of_outcome in dataclasses.fields(Outcome):
        name = field_of_outcome.name
        if name in value:
            kind = str(field_of_outcome.type).partition("[")[0]
            if not isinstance(value[name], TYPES_BY_NAME[kind]) or isinstance(value[name], bool):
                raise TypeError(f"{name}: expected {field_of_outcome.type}, found {value[name]!r}")
    texts = {*value.get("checks", {}).values(), *value.get("not_applicable", {}).values(), *value.get("replaced", ())}
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("checks, not_applicable, replaced: expected texts")
    if not all(type(number) in (int, float) for number in value.get("measures", {}).values()):
        raise TypeError("measures: expected numbers")
    unknown = {value["verdict"], *value.get("checks", {}).values()} - VERDICTS
    if unknown:
        raise ValueError(f"verdict {min(unknown)!r}: expected one of {', '.join(sorted(VERDICTS))}")


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Return the fields of an outcome that are not empty."""
    return {name: value for name, value in dataclasses.asdict(outcome).items() if value}


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """Return the data of an outcome without its report, whose contents are in `results` and `diagnosis`."""
    return {name: value for name, value in outcome_to_json(outcome).items() if name != "report"}


def outcome_from_json(value: Mapping[str, Any]) -> Outcome:
    """Return the outcome of the fields that outcome_to_json returned. Fields that only a later version has are left out.

    Raises KeyError without a verdict, TypeError for a field of another type, and ValueError for a verdict that does not
    exist.
    """
    _check_fields(value)
    known_names = {field_of_outcome.name for field_of_outcome in dataclasses.fields(Outcome)}
    fields = {name: field_value for name, field_value in value.items() if name in known_names}
    fields["replaced"] = tuple(value.get("replaced", ()))
    return Outcome(**fields)
