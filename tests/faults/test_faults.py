"""Faults on real ranks: they fire, the checks that should catch them do, the first line names them.

Here runs what asserts more than that; that every fault of the catalogue is caught and named is what `harness faults` proves.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness import ROOT
from harness.core.case.loading import find_case, load_all
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Firing, Verdict
from harness.core.report.text import case_report
from harness.core.run.judging import judge_folder
from harness.core.run.options import Options
from harness.core.run.run_case import run_case
from harness.faults import FaultError, all_faults, load_fault


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


def run(fault: str, case: str, out: Path) -> Judgement:
    return run_case(find_case(case, load_all()), Options(out=out, fault=fault, timeout=30))


def broken(judgement: Judgement) -> set[str]:
    return {result.check for result in judgement.results if result.verdict is Verdict.FAIL}


def passed(judgement: Judgement) -> set[str]:
    return {result.check for result in judgement.results if result.verdict is Verdict.PASS}


@pytest.mark.slow("16 real ranks; test_hsdp_that_ran_as_fsdp_is_named_from_traces_alone has literal ones")
def test_hsdp_run_as_fsdp_over_16_ranks_is_named_although_losses_gradients_and_groups_pass(out: Path) -> None:
    judgement = run("hsdp_runs_as_fsdp", "hsdp_2x8", out)
    assert broken(judgement) == {"shard_contents", "placements", "traffic", "memory", "reshard"}
    assert {"loss", "reported_loss", "gradients", "grad_norm", "update", "process_groups"} <= passed(judgement)
    report = case_report(judgement).splitlines()
    assert report[:6] == [
        "FAIL hsdp_2x8+hsdp_runs_as_fsdp",
        "  HSDP ran as FSDP: parameters are sharded over 16 ranks, requested 8, replicated 2 times",
        "  explains          5 of 5 failing checks: if that is assumed, they pass, and no passing check fails",
        "  shard groups      expected [0-7] [8-15]   observed [0-15]",
        "  replicate groups  expected [0,8] [1,9] .. [7,15]",
        "                    observed none in use (the groups exist, no collective ran over them)",
    ]
    told = " ".join(" ".join(report).split())
    assert "a loss-curve test passes here" in told
    assert "a listing of process groups passes here" in told


def test_stored_evidence_of_a_fault_is_judged_the_same_again(out: Path) -> None:
    judgement = run("hsdp_runs_as_fsdp", "hsdp_2x2", out)
    again = judge_folder(judgement.folder)
    assert (again.results, again.diagnosis, again.firing) == (judgement.results, judgement.diagnosis, judgement.firing)


OWN_FAULTS = """
from harness.faults import fault

@fault(breaks="nothing", bug="none", case="fsdp_2", caught_by="loss", named="")
def changes_nothing(fired):
    fired()

@fault(breaks="what is never called", bug="none", case="fsdp_2", caught_by="loss", named="")
def never_fires(fired):
    pass
"""


def test_a_fault_of_ones_own_that_changes_nothing_passes(out: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_FAULTS)
    judgement = run(f"{tmp_path}/own.py:changes_nothing", "fsdp_2", out)
    assert (judgement.verdict, judgement.firing) == (Verdict.PASS, Firing.FIRED)


def test_a_fault_that_did_not_fire_is_reported(out: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_FAULTS)
    judgement = run(f"{tmp_path}/own.py:never_fires", "fsdp_2", out)
    assert judgement.firing is Firing.NOT_FIRED
    assert "UNFIRED" in case_report(judgement)


def test_an_unknown_fault_is_refused_with_the_known_names() -> None:
    with pytest.raises(FaultError, match=r"no fault is named 'hsdp_as_fsdp' \(did you mean 'hsdp_runs_as_fsdp'\?\)"):
        load_fault("hsdp_as_fsdp")


def test_names_of_faults_are_unique() -> None:
    names = [fault.name for fault in all_faults()]
    assert len(names) == len(set(names))


def test_every_bug_that_a_fault_cites_can_be_looked_up() -> None:
    known = set(
        re.findall(
            r"^\| ([A-Z]\d\d) \|", (ROOT / "docs" / "results" / "bugs.md").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    cited = {number for fault in all_faults() for number in re.findall(r"\b[A-Z]\d\d\b", fault.bug)}
    assert len(known) == 150 and cited and cited <= known
