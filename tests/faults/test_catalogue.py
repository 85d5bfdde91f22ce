"""`harness faults`: outcomes, weaker tests, tables, what is stored; and that the catalogue covers what it should."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from literal import tiny_case

from harness import ROOT
from harness.core import cli
from harness.core.case.case import Case
from harness.core.checks import all_checks
from harness.core.evidence.records import Exit, Run
from harness.core.evidence.store import save_run
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Firing, Result, Verdict, diagnosis_of_one_cause
from harness.core.run.options import Options
from harness.faults import FAMILIES, Fault, FaultError, all_faults, faults_of_file
from harness.faults import catalogue_text as shown
from harness.faults import run_catalogue as lot
from harness.faults.attempt import METHODS, Attempt, Outcome, accepted_attempts, attempts_from_json, attempts_to_json
from harness.faults.cli.work.faults import exit_code_of_attempts
from harness.faults.run_catalogue import Baseline

FAULT = Fault(
    "halved", "f.py", "halves", "G01 a/b #1", "tiny", ("gradients", "update"), "gradients scaled", lambda fired: None
)
ATTEMPT = Attempt("halved", "G01 a/b #1", "gradient reduction", True, "tiny", Outcome.CAUGHT, "gradients are 0.5 times")
CURVE = (5.0, 4.0, 3.0)


def judgement(
    folder: Path,
    broken: str = "",
    cause: str = "",
    firing: Firing = Firing.FIRED,
    exit: Exit | None = None,
    kind: str = "gradients scaled",
) -> Judgement:

    (folder / "run").mkdir(exist_ok=True)
    save_run(Run(str(folder / "run"), 1, (exit or Exit(0, "ok"),), {}))
    results = tuple(Result(check, Verdict.FAIL, 1) for check in broken.split()) or (Result("loss", Verdict.PASS, 1),)
    return Judgement(
        tiny_case("fsdp_2"),
        folder,
        results,
        diagnosis_of_one_cause(cause, kind=kind) if cause else None,
        1.0,
        "halved",
        firing,
    )


def test_a_fault_is_caught_if_its_checks_are_broken_and_its_cause_is_named(tmp_path: Path) -> None:
    seen = judgement(tmp_path, "gradients update loss", "gradients are 0.5 times what they should be")
    assert lot.outcome_of(FAULT, seen) is Outcome.CAUGHT


@pytest.mark.parametrize(
    ("broken", "kind"),
    [("gradients", "gradients scaled"), ("gradients update", "not explained")],
    ids=["a check passes", "another cause"],
)
def test_a_fault_that_breaks_other_checks_or_is_named_otherwise_is_caught_otherwise(
    broken: str, kind: str, tmp_path: Path
) -> None:
    seen = judgement(tmp_path, broken, "gradients are 0.5 times what they should be", kind=kind)
    assert lot.outcome_of(FAULT, seen) is Outcome.OTHERWISE


def test_a_fault_that_fails_no_check_is_missed(tmp_path: Path) -> None:
    assert lot.outcome_of(FAULT, judgement(tmp_path)) is Outcome.MISSED


def test_a_fault_whose_run_left_too_little_to_be_judged_is_not_missed_by_any_check(tmp_path: Path) -> None:
    seen = judgement(tmp_path)
    unknown = (Result("completed", Verdict.UNKNOWN, 1, note="no space left"), Result("loss", Verdict.UNKNOWN))
    assert lot.outcome_of(FAULT, replace(seen, results=unknown)) is Outcome.NOT_TRIED
    assert lot.outcome_of(FAULT, replace(seen, results=(unknown[0], *judgement(tmp_path, "loss").results))) is (
        Outcome.OTHERWISE
    )


def test_a_fault_that_never_fired_is_unfired_whatever_failed(tmp_path: Path) -> None:
    seen = judgement(tmp_path, "gradients update", "gradients are 0.5 times", firing=Firing.NOT_FIRED)
    assert lot.outcome_of(FAULT, seen) is Outcome.UNFIRED


def test_a_fault_that_hangs_although_it_should_not_is_a_timeout(tmp_path: Path) -> None:
    late = Exit(0, "killed", error="killed by the harness at the time limit of 9 s", blamed=True)
    seen = judgement(tmp_path, "completed", "rank 0 hung", exit=late, kind="a process failed")
    assert lot.outcome_of(FAULT, seen) is Outcome.TIMEOUT
    hanging = replace(FAULT, caught_by=("completed",), named="a process failed", hangs=True)
    assert lot.outcome_of(hanging, seen) is Outcome.CAUGHT


@pytest.mark.parametrize(
    ("seen", "noticed"),
    [
        (CURVE, ""),
        ((5.0, 4.0, 3.00001), ""),
        ((5.0, 4.0, 3.0001), "within_1e_5"),
        ((5.0, 4.0, 3.1), "within_1_percent within_1e_5"),
        ((5.0, 4.0, math.nan), "within_1_percent within_1e_5"),
        ((), "exit_code within_1_percent within_1e_5 process_groups"),
    ],
)
def test_what_weaker_tests_notice(seen: tuple[float, ...], noticed: str) -> None:
    said = lot.weaker_test_results(ATTEMPT, CURVE, seen)
    assert {method for method, yes in said.items() if yes} == set(noticed.split())
    assert set(said) == set(METHODS)


def test_a_listing_of_groups_notices_what_breaks_the_check_of_groups() -> None:
    assert lot.weaker_test_results(replace(ATTEMPT, broken=("process_groups",)), CURVE, CURVE)["process_groups"]


def test_a_curve_that_lacks_steps_is_not_close_to_any() -> None:
    assert lot.curve_error(CURVE, CURVE[:2]) is None
    assert lot.curve_error(CURVE, [*CURVE[:-1], None]) == math.inf


def told(**noticed: bool) -> dict[str, bool]:
    return dict.fromkeys(METHODS, False) | noticed


def test_the_table_counts_real_bugs_only() -> None:
    done = [
        replace(ATTEMPT, weaker=told(within_1e_5=True)),
        replace(ATTEMPT, weaker=told(), outcome=Outcome.OTHERWISE),
        replace(ATTEMPT, weaker=told(exit_code=True), real=False),
        replace(ATTEMPT, weaker=told(), kinds=("not explained",)),
    ]
    assert shown.methods_table(done).splitlines() == [
        "| of 3 real bugs, re-created | notices |",
        "|---|---|",
        "| exit code only | 0 |",
        "| loss curve within 1% over 10 steps | 0 |",
        "| loss curve within 1e-5 over 10 steps | 1 |",
        "| listing of process groups | 0 |",
        "| this harness | 2 |",
        "| this harness, cause named and not only located | 1 |",
    ]


def test_the_listing_says_what_breaks_and_below_it_what_it_was_named(tmp_path: Path) -> None:
    stored = tmp_path / "results.json"
    alone = shown.faults_text([FAULT], accepted_attempts(stored))
    assert alone.splitlines() == ["gradient reduction", "  halved  tiny  halves [G01 a/b #1]"]
    stored.write_text(attempts_to_json([ATTEMPT]))
    assert shown.faults_text([FAULT], accepted_attempts(stored)) == alone + "\n    -> gradients are 0.5 times"


def test_the_report_lists_all_first_lines_and_what_is_lacking() -> None:
    missed = Attempt(
        "other",
        "M01 c/d #2",
        "mesh",
        True,
        "tiny",
        Outcome.MISSED,
        weaker=told(exit_code=True),
        note="not broken: memory",
    )
    control = replace(ATTEMPT, fault="control", outcome=Outcome.MISSED)
    text = shown.report_text([replace(ATTEMPT, weaker=told()), missed], control, 12.34)
    assert text.splitlines()[1:4] == [
        "CAUGHT  ----  halved  tiny  gradients are 0.5 times",
        "MISSED  a---  other   tiny  ",
        "              not broken: memory",
    ]
    assert text.endswith(
        "2 faults in 12.3 s: 1 CAUGHT, 1 MISSED\ncontrol, which changes nothing: MISSED, as it must be"
    )


@pytest.mark.parametrize(
    ("outcome", "code"),
    [("CAUGHT", 0), ("CAUGHT OTHERWISE", 1), ("MISSED", 1), ("TIMEOUT", 1), ("UNFIRED", 2), ("NOT TRIED", 2)],
)
def test_exit_codes(outcome: str, code: int) -> None:
    control = replace(ATTEMPT, outcome=Outcome.MISSED)
    assert exit_code_of_attempts([ATTEMPT, replace(ATTEMPT, outcome=Outcome(outcome))], control) == code


def test_a_control_that_is_caught_makes_all_worthless() -> None:
    assert exit_code_of_attempts([ATTEMPT], ATTEMPT) == 2


def test_results_are_read_back_as_they_were() -> None:
    done = [replace(ATTEMPT, weaker=told(), off=1e-3, broken=("loss",)), ATTEMPT]
    assert attempts_from_json(attempts_to_json(done)) == done


def test_a_file_that_has_a_control_of_its_own_is_judged_by_it_and_does_not_count_it() -> None:
    for name in ("megatron", "deepspeed"):
        known = faults_of_file(ROOT / "harness" / "faults" / f"{name}.py")
        control, others = lot.split_control(known)
        assert (control.case, control.name) == ("zero1_2", "nothing_is_wrong")
        assert len(others) == len(known) - 1
    assert lot.split_control([])[0].case == "fsdp_2"


# ---- on real ranks, through the command line

OWN = """
from harness.faults import fault, replace

@fault(breaks="the gradient is doubled", bug="an example", case="fsdp_2", caught_by="gradients", named="gradients scaled")
def doubled(fired):
    from harness.core.trainers.llama3 import trainer

    def make(original):
        def twice(loss, *args, **kwargs):
            fired()
            return 2 * original(loss, *args, **kwargs)
        return twice

    replace(trainer, "scale_loss", make)

@fault(breaks="nothing", bug="an example", case="no_such_case", caught_by="loss", named="")
def of_no_case(fired):
    pass
"""


def test_faults_of_ones_own_file_run_with_baseline_and_control(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    code = cli.main(["faults", "--file", f"{tmp_path}/own.py", "-k", "doubled", "--out", f"{tmp_path}/out"])
    shown = capsys.readouterr()
    assert code == 0, shown.out
    assert re.search("^CAUGHT  [-abcd]{4}  doubled  fsdp_2  gradients are 2 times what they", shown.out, re.MULTILINE)
    assert "control, which changes nothing: MISSED, as it must be" in shown.out
    (record,) = json.loads((tmp_path / "out" / "faults.json").read_text())
    assert (record["fault"], record["outcome"], record["weaker"]["within_1_percent"]) == ("doubled", "CAUGHT", False)


def test_a_fault_of_a_case_that_does_not_exist_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    assert cli.main(["faults", "--file", f"{tmp_path}/own.py", "--out", f"{tmp_path}/out"]) == 2
    assert "no case is named 'no_such_case'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("trainer", "typed"), [("megatron", []), ("megatron", ["--trainer", "megatron"]), ("deepspeed", [])]
)
def test_a_trainers_catalogue_without_its_cases_is_answered_with_the_command_that_runs_it(
    trainer: str, typed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ROOT / "harness" / "faults" / f"{trainer}.py"
    assert cli.main(["faults", "--file", str(file), *typed, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"harness: --file {file}: mistakes in {trainer}, on cases of its own; `harness faults --trainer {trainer}` takes both\n"
    )
    assert cli.main(["faults", "--file", str(file), "--list"]) == 0


def test_a_fault_that_names_an_unknown_check_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(OWN.replace('caught_by="gradients"', 'caught_by="gradient"'))
    assert cli.main(["faults", "--file", f"{tmp_path}/own.py", "-k", "doubled", "--out", f"{tmp_path}/out"]) == 2
    assert "own.py:doubled: caught_by 'gradient': no such check; known: completed, " in capsys.readouterr().err


def test_a_file_without_faults_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("")
    with pytest.raises(FaultError, match="no fault in it"):
        faults_of_file(tmp_path / "own.py")


def test_the_list_of_faults_is_by_kind_of_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["faults", "--list", "-k", "hsdp_runs_as"]) == 0
    assert [line.split("  ")[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["mesh"],
        ["", "hsdp_runs_as_fsdp"],
        ["", ""],
        ["", "hsdp_runs_as_ddp"],
        ["", ""],
    ]


# ---- the catalogue itself


def test_every_fault_is_modelled_on_a_bug_or_a_kind_of_bugs() -> None:
    assert [fault.name for fault in all_faults() if not fault.family] == []


def test_every_kind_of_bug_has_a_fault() -> None:
    missing = set(FAMILIES.values()) - {fault.family for fault in all_faults()}
    assert missing == set()


def test_every_check_of_the_trainer_is_tripped_by_two_faults() -> None:
    """golden judges the reference, which no fault of a rank can move."""
    tripped = Counter(check for fault in all_faults() for check in fault.caught_by)
    assert {check: tripped[check] for check in all_checks() if tripped[check] < 2 and check != "golden"} == {}


def test_what_was_measured_is_of_the_faults_there_are() -> None:
    """`harness faults -k NAME` measures a new one, `python -m tools.tables out/faults.json` stores it."""
    assert [attempt.fault for attempt in accepted_attempts()] == [f.name for f in all_faults()]


def test_checks_that_faults_name_exist() -> None:
    assert {check for fault in all_faults() for check in fault.caught_by} <= set(all_checks())


def test_an_unexpected_exception_leaves_one_fault_untried_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: object) -> None:
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(lot, "run_case", raising)
    tried = lot.try_fault(all_faults()[0], Baseline(Case("fsdp_2", "a test")), Options())
    assert tried.outcome is Outcome.NOT_TRIED and "KeyError('nobody thought of this') in raising, " in tried.note
    assert "KeyError" in lot.make_baseline(Case("fsdp_2", "a test"), Options(), curves=False).problem


def test_what_is_not_caught_is_told_once_more_at_the_end() -> None:
    missed = replace(ATTEMPT, fault="lost", outcome=Outcome.MISSED, cause="", note="no check fails")
    *_, again, counts = shown.report_text([ATTEMPT, missed, ATTEMPT], None, 1.0).split("\n\n")
    assert again.split() == ["MISSED", "lost", "tiny", "no", "check", "fails"]
    assert counts == "3 faults in 1.0 s: 2 CAUGHT, 1 MISSED"
    assert shown.report_text([ATTEMPT], None, 1.0).count("halved") == 1
