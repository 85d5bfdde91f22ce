"""A judgement as a person reads it, whole. EXPECTTEST_ACCEPT=1 rewrites the texts after a deliberate change of wording."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from expecttest import assert_expected_inline
from literal import SGD, tiny_case, trial_of, with_parameter, without_rank

from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.checks import judge
from harness.core.evidence.records import Exit
from harness.core.judge.finding import Bound, Finding
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Firing, Result, Verdict, diagnosis_of_one_cause
from harness.core.judge.trial import Trial
from harness.core.report.finding_text import finding_text
from harness.core.report.grid import replaced_parts_text as replaced_in_cases
from harness.core.report.outcome import judged_outcome
from harness.core.report.text import case_report, check_text, headline, provenance_text, pytest_command, rerun_command


def judgement_of(trial: Trial, fault: str | None = None, firing: Firing = Firing.NO_FAULT) -> Judgement:
    results = judge(trial)
    return Judgement(trial.case, Path("out/tiny"), results, diagnose(trial, results), 1.5, fault, firing)


def hsdp_as_fsdp() -> Trial:
    return trial_of(tiny_case("hsdp_2x2", SGD), tiny_case(ParallelDims(dp_shard=4), SGD))


def test_a_case_that_passes() -> None:
    assert_expected_inline(
        case_report(judgement_of(trial_of(tiny_case("hsdp_2x2", runs=2)))),
        """\
PASS tiny

  completed         PASS            4 examined
  collective_order  PASS            108 examined
  features          PASS            160 examined
  memory            PASS            36 examined
  placements        PASS            72 examined
  process_groups    PASS            8 examined
  reshard           PASS            144 examined
  settings          PASS            84 examined
  shard_contents    PASS            48 examined
  traffic           PASS            60 examined
  initial_weights   PASS            12 examined
  samples           PASS            24 examined
  determinism       PASS            12 examined
  finite            PASS            16 examined
  golden            PASS            6 examined
  grad_norm         PASS            12 examined, largest difference 0.0e+00
  gradients         PASS            144 examined, largest difference 0.0e+00
  loss              PASS            3 examined, largest difference 0.0e+00
  replica_agreement PASS            144 examined
  reported_loss     PASS            12 examined, largest difference 0.0e+00
  reported_rate     PASS            12 examined, largest difference 0.0e+00
  update            PASS            144 examined
  exchange          NOT APPLICABLE  neither tensor, context nor pipeline parallelism
  schedule          NOT APPLICABLE  no pipeline: pp 1
  checkpoint        NOT APPLICABLE  this launch writes none
  export            NOT APPLICABLE  no export is requested
  positions         NOT APPLICABLE  the model receives none: it counts from 0, or reads them from a table
  resume            NOT APPLICABLE  nothing is resumed
  reported_numbers  NOT APPLICABLE  this trainer reports no others""",
    )


def test_what_did_not_run_as_its_users_run_it_is_said_with_every_verdict() -> None:
    passed = judgement_of(trial_of(tiny_case("single")))
    passed = replace(passed, made={"replaced": "attention: FlexAttention by SDPA (no CPU kernel)\nloss: a by b (c)"})
    told = [
        "  replaced          attention: FlexAttention by SDPA (no CPU kernel)",
        "                    loss: a by b (c)",
    ]
    assert case_report(passed).splitlines()[1:3] == told
    assert set(told) < set(check_text(passed, passed.results[0]).splitlines())
    assert (
        replaced_in_cases([judged_outcome(passed), judged_outcome(passed)])[0].splitlines()[1]
        == "    2 x  attention: FlexAttention by SDPA (no CPU kernel)"
    )


@pytest.fixture(scope="module")
def failed() -> list[str]:
    """The paragraphs of its report: the diagnosis, a line for each check, then each check that fails."""
    return case_report(judgement_of(hsdp_as_fsdp(), "hsdp_runs_as_fsdp", Firing.FIRED)).split("\n\n")


def test_a_case_that_fails_begins_with_the_cause_and_what_shows_it(failed: list[str]) -> None:
    assert_expected_inline(
        failed[0],
        """\
FAIL tiny+hsdp_runs_as_fsdp
  HSDP ran as FSDP: parameters are sharded over 4 ranks, requested 2, replicated 2 times
  explains          5 of 5 failing checks: if that is assumed, they pass, and no passing check fails
  shard groups      expected [0,1] [2,3]   observed [0-3]
  replicate groups  expected [0,2] [1,3]
                    observed none in use (the groups exist, no collective ran over them)
  contents          12 of 12 parameters are held otherwise than planned; tok_embeddings.weight on
                      rank 0: expected 1/2 of dim 0 [0:4], observed 1/4 of dim 0 [0:2]
  traffic           of rank 0 in step 1:
                    parameters, all_gather over dp_shard in forward: planned 1.888 kB, moved 0 B
                    parameters, all_gather over dp_shard in backward: planned 1.6 kB, moved 0 B
                    gradients, reduce_scatter over dp_shard in backward: planned 1.888 kB, moved 0 B
                    gradients, all_reduce over dp_replicate in backward: planned 944 B, moved 0 B
                    over [0-3], no planned axis: 3.488 kB by all_gather, 1.888 kB by reduce_scatter
  loss, gradients   equal to the reference exactly: a loss-curve test passes here
  groups            every group of the plan exists: a listing of process groups passes here
  again             harness run tiny --fault hsdp_runs_as_fsdp
  evidence          out/tiny""",
    )


def test_below_the_cause_each_check_has_a_line(failed: list[str]) -> None:
    assert_expected_inline(
        failed[1],
        """\
  memory            FAIL            36 examined, 12 findings
  placements        FAIL            72 examined, 76 findings
  reshard           FAIL            144 examined, 144 findings
  shard_contents    FAIL            48 examined, 48 findings
  traffic           FAIL            60 examined, 84 findings
  replica_agreement UNKNOWN         ranks [0,2] should hold the same slice of tok_embeddings.weight and do not (24 of 24 such slices); see `shard_contents`
  completed         PASS            4 examined
  collective_order  PASS            84 examined
  features          PASS            156 examined
  process_groups    PASS            8 examined
  settings          PASS            84 examined
  initial_weights   PASS            12 examined
  samples           PASS            24 examined
  finite            PASS            16 examined
  golden            PASS            6 examined
  grad_norm         PASS            12 examined, largest difference 0.0e+00
  gradients         PASS            144 examined, largest difference 0.0e+00
  loss              PASS            3 examined, largest difference 0.0e+00
  reported_loss     PASS            12 examined, largest difference 0.0e+00
  reported_rate     PASS            12 examined, largest difference 0.0e+00
  update            PASS            144 examined
  exchange          NOT APPLICABLE  neither tensor, context nor pipeline parallelism
  schedule          NOT APPLICABLE  no pipeline: pp 1
  checkpoint        NOT APPLICABLE  this launch writes none
  export            NOT APPLICABLE  no export is requested
  positions         NOT APPLICABLE  the model receives none: it counts from 0, or reads them from a table
  resume            NOT APPLICABLE  nothing is resumed
  determinism       NOT APPLICABLE  the case requests one run (runs: 2 repeats it)
  reported_numbers  NOT APPLICABLE  this trainer reports no others""",
    )


def test_each_check_that_is_broken_shows_its_first_findings_and_how_many_more_there_are(failed: list[str]) -> None:
    assert [text.split(":")[0].strip() for text in failed[2:]] == [
        "memory",
        "placements",
        "reshard",
        "shard_contents",
        "traffic",
    ]
    assert_expected_inline(
        failed[5],
        """\
  shard_contents: Each rank holds, byte for byte, the slice of every seed weight that the plan gives it.
    rank 0, slice of tok_embeddings.weight: expected 1/2 of dim 0 [0:4], observed 1/4 of dim 0 [0:2]
    rank 0, slice of layers.0.attention.wq.weight: expected 1/2 of dim 0 [0:2], observed 1/4 of dim 0 [0:1]
    rank 0, slice of layers.0.attention.wk.weight: expected 1/2 of dim 0 [0:2], observed 1/4 of dim 0 [0:1]
    rank 0, slice of layers.0.attention.wv.weight: expected 1/2 of dim 0 [0:2], observed 1/4 of dim 0 [0:1]
    rank 0, slice of layers.0.attention.wo.weight: expected 1/2 of dim 0 [0:2], observed 1/4 of dim 0 [0:1]
    rank 0, slice of layers.0.feed_forward.w1.weight: expected 1/2 of dim 0 [0:4], observed 1/4 of dim 0 [0:2]
    rank 0, slice of layers.0.feed_forward.w2.weight: expected 1/2 of dim 0 [0:2], observed 1/4 of dim 0 [0:1]
    rank 0, slice of layers.0.feed_forward.w3.weight: expected 1/2 of dim 0 [0:4], observed 1/4 of dim 0 [0:2]
    and 40 more""",
    )


def test_a_case_in_which_a_rank_died() -> None:
    trial = without_rank(trial_of(tiny_case("fsdp_2")), 1)
    dead = Exit(1, "raised", 1, error="ValueError: no", blamed=True, stack="a.py:7 in f\nb.py:9 in g\n")
    waited = Exit(0, "raised", 1, error="RuntimeError: Connection closed by peer")
    trial = replace(trial, run=replace(trial.run, exits=(waited, dead)))
    assert_expected_inline(
        case_report(judgement_of(trial)),
        """\
FAIL tiny    rank 1 raised: ValueError: no
  stack             a.py:7 in f
                    b.py:9 in g
  not to blame      rank 0 only waited
  again             harness run tiny
  evidence          out/tiny

  completed         FAIL            2 examined, 2 findings
  28 other checks   UNKNOWN         no evidence from rank 1; see `completed`

  completed: Every rank exited by itself with code 0, left evidence of every requested step and parameter, and left no process behind.
    rank 1: expected exit code 0, observed raised: ValueError: no
      a.py:7 in f
      b.py:9 in g
    rank 0, only waited: expected exit code 0, observed raised: RuntimeError: Connection closed by peer""",
    )


def test_checks_share_a_line_only_if_they_could_not_be_judged_for_the_same_reason() -> None:
    unknown = [Result(name, Verdict.UNKNOWN, note="no memory") for name in ("loss", "golden", "memory")]
    without_note = [Result(name, Verdict.UNKNOWN) for name in ("update", "finite", "samples")]
    failing = Result("traffic", Verdict.FAIL, 1, note="no memory")
    judgement = replace(judgement_of(trial_of(tiny_case("fsdp_2"))), results=(*unknown, *without_note, failing))
    first_words = [line.split()[0] for line in case_report(judgement).splitlines() if line.startswith("  ")]
    assert first_words == ["traffic", "update", "finite", "samples", "3"]


def test_a_fault_that_did_not_fire() -> None:
    report = case_report(judgement_of(trial_of(tiny_case("fsdp_2")), "mine.py:never_fires", Firing.NOT_FIRED))
    assert report.splitlines()[:2] == [
        "PASS tiny+never_fires",
        "  UNFIRED           the change ran on no rank: this run proves nothing about it",
    ]


def test_a_change_that_ran_and_broke_nothing_is_told_from_one_that_did_not_run() -> None:
    def labels(trial: Trial, *fault: object) -> list[str]:
        lines = case_report(judgement_of(trial, *fault)).splitlines()
        return [
            line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in ("MISSED", "RAN", "UNFIRED")
        ]

    passes, fault = trial_of(tiny_case("fsdp_2")), "mine.py:changes_nothing"
    assert labels(passes, fault, Firing.FIRED) == ["MISSED"]
    assert "the change ran and every check passes" in case_report(judgement_of(passes, fault, Firing.FIRED))
    assert labels(passes, fault, Firing.NOT_FIRED) == ["UNFIRED"]
    assert labels(replace(passes, golden=None, golden_problem="none"), fault, Firing.FIRED) == ["RAN"]
    assert labels(hsdp_as_fsdp(), fault, Firing.FIRED) == labels(passes) == []


def test_a_case_that_could_not_be_judged_says_why_in_its_first_line() -> None:
    trial = replace(trial_of(tiny_case("single")), golden=None, golden_problem="no golden of this recipe")
    assert headline(judgement_of(trial)) == "UNKNOWN tiny    golden: no golden of this recipe"


def test_one_check_as_a_test_runner_shows_it() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_parameter(trial, 1, "norm.weight", value=trial.reference.weights["norm.weight"])
    judgement = judgement_of(trial)
    result = next(result for result in judgement.results if result.check == "shard_contents")
    lines = check_text(judgement, result).splitlines()
    finding = "rank 1, slice of norm.weight: expected 1/2 of dim 0 [2:4], observed whole"
    assert lines[0] == f"shard_contents: {finding}"
    assert lines[-4:] == [
        "shard_contents FAIL",
        f"  {finding}",
        "  again             pytest -k tiny",
        "  evidence          out/tiny",
    ]


def test_a_check_without_a_verdict_as_a_test_runner_shows_it() -> None:
    judgement = judgement_of(trial_of(tiny_case("fsdp_2")))
    unknown = Result("golden", Verdict.UNKNOWN, note="no golden of this recipe")
    assert_expected_inline(
        check_text(judgement, unknown),
        """\
golden UNKNOWN: no golden of this recipe
  again             pytest -k tiny
  evidence          out/tiny""",
    )


def test_a_finding_that_runs_over_several_lines_is_indented() -> None:
    finding = Finding.at(1, "exit code 0", "raised\na.py:7 in f")
    assert finding_text(finding, "  ") == "  rank 1: expected exit code 0, observed raised\n    a.py:7 in f"


def test_a_finding_shows_its_bound() -> None:
    finding = Finding(step=1, expected=2.0, observed=2.1, bound=Bound(1e-14))
    assert finding_text(finding) == "step 1: expected 2, observed 2.1 (bound 1.0e-14)"


def test_what_stands_above_the_checks_fits_a_terminal_of_100_columns_but_for_what_is_copied_from_it() -> None:
    head, _, _ = case_report(judgement_of(hsdp_as_fsdp(), "hsdp_runs_as_fsdp", Firing.FIRED)).partition("\n\n")
    assert max(len(line) for line in head.splitlines()) <= 100
    long = replace(judgement_of(hsdp_as_fsdp()), folder=Path("out") / ("x" * 100))
    assert f"  evidence          out/{'x' * 100}" in case_report(long).splitlines()


def test_a_row_that_fits_is_one_line_and_one_that_does_not_goes_on_further_in() -> None:
    rows = (("groups", "expected [0,1]   observed [0-3]"), ("groups", f"expected [0,1]   observed none {'x ' * 50}x"))
    judged = replace(judgement_of(hsdp_as_fsdp()), diagnosis=diagnosis_of_one_cause("wrong", rows))
    assert case_report(judged).splitlines()[1:5] == [
        "  groups            expected [0,1]   observed [0-3]",
        "                    expected [0,1]",
        "                    observed none x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x",
        "                      x x x x x x x x x x x x x x x x x x",
    ]


# ---- how to see it again, and what the evidence is of


def made_with(**made: str) -> Judgement:
    return replace(judgement_of(hsdp_as_fsdp()), made=made)


def test_what_shows_it_again_names_every_option_that_is_not_the_usual_one() -> None:
    usual = made_with(device="cpu", launcher="local", commit="4a75911")
    assert (rerun_command(usual), pytest_command(usual)) == ("harness run tiny", "pytest -k tiny")
    other = replace(made_with(device="cuda", launcher="torchrun"), trainer="torchtitan@/src")
    how = "--trainer torchtitan --source /src --device cuda --launcher torchrun"
    assert rerun_command(other) == f"harness run tiny {how}"
    assert (
        pytest_command(other)
        == "pytest -k tiny --harness-trainer=torchtitan --harness-source=/src --harness-device=cuda --harness-launcher=torchrun"
    )
    slow = made_with(timeout="600", **{"torchrun-args": "--nnodes 2", "ranks-per-gpu": "2"})
    assert rerun_command(slow) == "harness run tiny --ranks-per-gpu 2 --timeout 600 '--torchrun-args=--nnodes 2'"
    nightly = replace(usual, case=replace(usual.case, tier="nightly"))
    assert pytest_command(nightly) == "pytest -k tiny -m harness_nightly"


def test_a_folder_with_evidence_of_two_commits_says_so() -> None:
    new = made_with(started="2026-11-21 15:30:00 UTC", torch="2.13.0", commit="4a75911")
    old = made_with(started="2026-11-20 09:00:00 UTC", torch="2.13.0", commit="23f1604")
    assert provenance_text([new]) == "evidence of 2026-11-21 15:30:00 UTC; torch 2.13.0; commit 4a75911"
    assert provenance_text([new, new, old]) == (
        "evidence of 2026-11-20 09:00:00 UTC to 2026-11-21 15:30:00 UTC; torch 2.13.0; "
        "commit 4a75911 (2 cases), 23f1604 (1 cases)"
    )
    assert provenance_text([made_with()]) == "torch unknown; commit unknown"
