"""The documents of `--json` and their schema: what is valid, what is not, and that the schema says what the code has."""

from __future__ import annotations

import dataclasses
import datetime
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from json_documents import SCHEMA, valid, wrong
from jsonschema import Draft202012Validator
from literal import SGD, tiny_case, trial_of, with_parameter, without_rank
from literal_nights import nights, run

from harness import ROOT
from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.checks import judge
from harness.core.judge import finding, result
from harness.core.judge.finding import KINDS, Bound, Finding, Limit, Part
from harness.core.judge.judgement import Judgement
from harness.core.judge.measures import HELD
from harness.core.judge.result import Cause, Firing, Result, Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.figures.rank_bytes import RankBytes
from harness.core.plan.traffic.flow import Flow
from harness.core.report import documents
from harness.core.report.as_data import as_data, document_text
from harness.core.report.documents import SCHEMA_FILE, case_document, case_document_here, shown_result_data
from harness.core.report.finding_text import MAX_SHOWN_FINDINGS
from harness.core.report.outcome import Outcome, judged_outcome, outcome_document, outcome_from_json, outcome_to_json
from harness.faults import attempt
from harness.faults.attempt import Attempt
from harness.nights import history_text
from harness.nights.bisect.search import JudgedRevision
from harness.nights.history_text import build_series_changes
from harness.nights.nights import Culprit, culprits_by_case
from harness.nights.quarantine import QuarantineEntry
from harness.recording.judged.anomalies import Anomaly


def judgement_of(trial: Trial, **more: Any) -> Judgement:
    results = judge(trial)
    return Judgement(trial.case, Path("out/tiny"), results, diagnose(trial, results), 1.5, **more)


def hsdp_as_fsdp() -> Trial:
    return trial_of(tiny_case("hsdp_2x2", SGD), tiny_case(ParallelDims(dp_shard=4), SGD))


def written(judgement: Judgement) -> dict[str, Any]:
    return valid(document_text("case", case_document_here(judgement)) + "\n", "case")


def test_a_case_says_what_its_results_and_its_diagnosis_are() -> None:
    judgement = judgement_of(
        hsdp_as_fsdp(), fault="f.py:wrong", firing=Firing.FIRED, made={"torch": "2", "replaced": "a\nb"}
    )
    assert judgement.diagnosis is not None
    found = written(judgement)
    assert (found["verdict"], found["fault"], found["fired"]) == ("FAIL", "f.py:wrong", True)
    assert [one["kind"] for one in found["diagnosis"]["causes"]] == list(judgement.diagnosis.kinds)
    assert found["diagnosis"]["causes"][0]["details"] == as_data(judgement.diagnosis.causes[0].details) != []
    assert {one["check"]: one["verdict"] for one in found["results"]} == {
        one.check: str(one.verdict) for one in judgement.results
    }
    contents = next(one for one in found["results"] if one["check"] == "shard_contents")
    own = next(one for one in judgement.results if one.check == "shard_contents")
    assert len(contents["findings"]) == len(own.findings)
    assert contents["findings"][0]["ranks"] == list(own.findings[0].ranks)
    assert (found["replaced"], found["made"]) == (["a", "b"], {"torch": "2"})


@pytest.mark.parametrize(
    "trial",
    [
        trial_of(tiny_case("single")),
        without_rank(trial_of(tiny_case("fsdp_2")), 1),
        with_parameter(trial_of(tiny_case("fsdp_2")), 1, "norm.weight", dtype="float16"),
        trial_of(tiny_case("fsdp_2", wrapper="zero1")),
    ],
    ids=["passed", "without a rank", "of another dtype", "flat"],
)
def test_cases_that_end_otherwise_are_valid(trial: Trial) -> None:
    judgement = judgement_of(trial)
    assert written(judgement)["verdict"] == str(judgement.verdict)


def test_every_value_that_a_finding_may_have_is_valid_and_numbers_that_json_lacks_are_text() -> None:
    values = (
        *("freed", True, 3, 0.5, None, float("nan"), float("-inf"), (0, 1), ((0, 2), (2, 4))),
        *(Limit(1, None), Limit(None, 2.5), Part(((0, 2), (0, 4)), (4, 4)), Part(((1, 9),), (16,), flat=True)),
    )
    findings = tuple(
        Finding.at(1, value, value, check="memory", kind="parameter", bound=Bound(float("inf"), "why"), step=2)
        for value in values
    )
    single = judgement_of(trial_of(tiny_case("single")))
    found = written(replace(single, results=(Result("memory", Verdict.FAIL, 1, findings, largest=float("nan")),)))
    (said,) = found["results"]
    assert said["largest"] == "nan"
    assert [one.get("observed") for one in said["findings"]] == [
        *("freed", True, 3, 0.5, None, "nan", "-inf", [0, 1], [[0, 2], [2, 4]]),
        *({"least": 1}, {"most": 2.5}),
        {"intervals": [[0, 2], [0, 4]], "shape": [4, 4], "flat": False},
        {"intervals": [[1, 9]], "shape": [16], "flat": True},
    ]


def test_a_name_that_is_no_text_is_shown_by_numbers_and_control_characters_are_escaped() -> None:
    odd = Finding.at(0, 1, 2, check="memory", name="caf\udce9 \x1b[31m\x00\u2028é", note="\ud800")
    single = judgement_of(trial_of(tiny_case("single")), made={"a\udcff": "x"})
    text = document_text("case", case_document(replace(single, results=(Result("memory", Verdict.FAIL, 1, (odd,)),))))
    assert text.isascii() and "\x1b" not in text
    found = valid(text + "\n", "case")
    assert found["results"][0]["findings"][0]["name"] == "caf\\udce9 \x1b[31m\x00\u2028é"
    assert found["made"] == {"a\\udcff": "x"}
    json.dumps(found, ensure_ascii=False).encode("utf-8")


@pytest.mark.slow("nine whole documents; test_cases_that_end_otherwise_are_valid has valid ones")
def test_a_broken_document_is_not_valid() -> None:
    whole = written(judgement_of(hsdp_as_fsdp()))
    failing = next(number for number, one in enumerate(whole["results"]) if one.get("findings"))

    def broken(change: Any) -> list[str]:
        other = json.loads(json.dumps(whole))
        change(other)
        return wrong(other)

    assert broken(lambda one: None) == []
    assert broken(lambda one: one["results"][failing]["findings"][0].update(unknown=1))
    assert broken(lambda one: one.pop("verdict"))
    assert broken(lambda one: one["results"][0].pop("verdict"))
    assert broken(lambda one: one["results"][0].update(verdict="GREEN"))
    assert broken(lambda one: one["results"][failing]["findings"][0].update(kind="planet"))
    assert broken(lambda one: one.update(unknown=1))
    assert broken(lambda one: one.update(schema=2))
    assert broken(lambda one: one["diagnosis"]["causes"][0].update(unknown=1))


def test_the_schema_has_the_fields_that_the_code_has() -> None:
    kinds: dict[str, type] = {
        **{"finding": Finding, "limit": finding.Limit, "part": finding.Part, "bound": finding.Bound},
        **{"cause": Cause, "diagnosis": result.Diagnosis, "dims": ParallelDims, "flow": Flow, "odd": Anomaly},
        **{"attempt": Attempt, "culprit": Culprit, "side": JudgedRevision},
    }
    for name, kind in kinds.items():
        assert set(SCHEMA["$defs"][name]["properties"]) == {one.name for one in dataclasses.fields(kind)}, name
    more = {
        "result": (Result, {"more"}),
        "bytes": (RankBytes, {"rank", "stays", "loss", "backward", "most", "phase", "reserved"}),
    }
    for name, (kind, added) in more.items():
        assert set(SCHEMA["$defs"][name]["properties"]) == {one.name for one in dataclasses.fields(kind)} | added
    of_outcome = {one.name for one in dataclasses.fields(Outcome)} - {"report"}
    assert set(SCHEMA["$defs"]["outcome"]["properties"]) == of_outcome


def test_the_schema_has_the_words_that_the_code_has() -> None:
    assert SCHEMA["$defs"]["verdict"]["enum"] == [str(one) for one in Verdict]
    assert SCHEMA["$defs"]["finding"]["properties"]["kind"]["enum"] == list(KINDS)
    assert SCHEMA["$defs"]["attempt"]["properties"]["outcome"]["enum"] == [str(one) for one in attempt.Outcome]


def test_the_schema_lies_beside_the_code_that_writes_it() -> None:
    assert SCHEMA_FILE.parent == Path(documents.__file__).parent
    Draft202012Validator.check_schema(SCHEMA)
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    assert f"core/report/{SCHEMA_FILE.name}" in packed["harness"]


def test_what_is_not_green_keeps_the_first_findings_and_says_how_many_more_there_are() -> None:
    many = Result("loss", Verdict.FAIL, 20, tuple(Finding.at(rank, 1, 2, check="loss") for rank in range(20)))
    judgement = replace(judgement_of(hsdp_as_fsdp()), results=(many,))
    outcome = outcome_from_json(json.loads(json.dumps(outcome_to_json(judged_outcome(judgement)))))
    (shown,) = outcome.results
    assert (len(shown["findings"]), shown["more"]) == (MAX_SHOWN_FINDINGS, 20 - MAX_SHOWN_FINDINGS)
    assert shown_result_data((many,)) == outcome.results
    assert outcome.diagnosis == as_data(judgement.diagnosis)
    said = outcome_document(outcome)
    assert "report" not in said
    assert wrong({"harness": "1", "schema": 1, "document": "matrix", "outcomes": [said], "notes": []}) == []
    green = judged_outcome(judgement_of(trial_of(tiny_case("single"))))
    assert (green.results, green.diagnosis) == ([], {})


def test_a_series_of_nights_with_all_that_may_be_said_of_it() -> None:
    def night(number: int, size: float, b: Outcome, c: Outcome) -> Any:
        return run(number, Outcome("a", "PASS", measures={HELD: size}), b, c)

    b, c = Outcome("b", "PASS"), Outcome("c", "PASS")
    broken = [Outcome(one.case, "FAIL", cause="why", again="harness run b") for one in (b, c)]
    day = datetime.date(2026, 3, 1)
    one = build_series_changes(
        nights(night(1, 1.0, b, c), night(2, 2.0, *broken)),
        [QuarantineEntry("c", "why", "a reason", "Ada", day)],
        day,
        culprits_by_case([Culprit(("b",), "002", "why", "c1", "c2", name="c2 of a day")]),
    )
    found = valid(
        document_text("history", {"series": [history_text.series_document(one)], "quarantine": []}) + "\n", "history"
    )
    (series,) = found["series"]
    of = {each["case"]: each for each in series["changes"]}
    assert (of["b"]["culprit"]["name"], of["b"]["before"], of["b"]["now"]) == ("c2 of a day", "001", "002")
    assert (of["b"]["set_aside"], of["c"]["set_aside"], series["set_aside"][0]["until"]) == (False, True, "2026-03-01")
    assert series["more"] == [{"case": "a", "measure": HELD, "was": 1.0, "now": 2.0}]
    assert [each["run"] for each in series["nights"]] == ["001", "002"]
