"""What all checks share: a correct run passes every one of them, and nothing that was not seen ever passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from checked import like
from literal import (
    ADAMW,
    EIGHT,
    LAYOUTS,
    SGD,
    UNEVEN,
    judged,
    tiny_case,
    trial_of,
    with_every_rank,
    with_rank,
    with_step,
    with_value,
    without_rank,
    without_step,
)

from harness.core.case.dims import ParallelDims
from harness.core.checks import all_checks, check_sentence, judge, run_check
from harness.core.evidence.provided import RECORDED
from harness.core.evidence.records import Collective
from harness.core.judge.finding import Part
from harness.core.judge.result import Result, Verdict, verdict_of
from harness.core.plan.traffic.flow import PARAMETER_ROLES

NAMES = [
    "completed",
    *("collective_order", "exchange", "features", "memory", "placements", "process_groups", "reshard", "settings"),
    *("shard_contents", "traffic"),
    *("initial_weights", "samples"),
    *(
        "determinism",
        "finite",
        "golden",
        "grad_norm",
        "gradients",
        "loss",
        "replica_agreement",
        "reported_loss",
        "reported_rate",
        "update",
    ),
]
VARIANTS = {
    "plain": {},
    "accumulation": {"accumulation": 2},
    "uneven": {"model": UNEVEN},
    "twice": {"runs": 2},
    "checkpointed": {"activation_checkpointing": "full"},
    "compiled": {"compile": True},
    "resharded always": {"reshard_after_forward": "always"},
    "never resharded, no sequence parallel": {"reshard_after_forward": "never", "sequence_parallel": False},
}
HAS_REPLICAS = {"ddp_2", "hsdp_2x2", "tp_2", "fsdp_2_tp_2"}


def test_the_checks_are_these_in_this_order() -> None:
    assert set(NAMES) <= set(all_checks())
    assert [name for name in all_checks() if name in NAMES] == NAMES


def test_every_check_is_one_sentence() -> None:
    for name in all_checks():
        assert check_sentence(name)[0].isupper() and check_sentence(name).endswith("."), name


KEYS = [(op, phase) for op in ("all_gather", "reduce_scatter", "all_reduce") for phase in ("forward", "backward")]
RECIPES = {"adamw": ADAMW, "sgd": SGD, "variable": replace(ADAMW, variable_length=True, decay="matrices")}


@pytest.mark.parametrize("training", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_correct_run_passes_every_check_and_each_examines_something(layout: str, variant: str, training) -> None:
    results = {result.check: result for result in judge(trial_of(tiny_case(layout, training, **VARIANTS[variant])))}
    silent = {"collective_order", "process_groups", "traffic"} if layout == "single" else set()
    silent |= set() if layout in HAS_REPLICAS else {"replica_agreement"}
    silent |= set() if "tp" in layout else {"exchange"}
    silent |= set() if variant == "twice" else {"determinism"}
    silent |= set() if "fsdp" in layout or "hsdp" in layout else {"reshard"}
    for name in NAMES:
        expected = Verdict.NOT_APPLICABLE if name in silent else Verdict.PASS
        assert results[name].verdict == expected, results[name]
        assert (results[name].examined > 0) == (name not in silent), results[name]
        assert results[name].findings == ()


def test_with_a_rank_missing_only_completed_judges_and_it_fails() -> None:
    results = {result.check: result for result in judge(without_rank(trial_of(tiny_case("hsdp_2x2")), 3))}
    assert results["completed"] == Result("completed", Verdict.FAIL, 4, (like(3, "an evidence file", None),))
    for name in NAMES[1:]:
        assert results[name] == Result(name, Verdict.UNKNOWN, note="no evidence from rank 3; see `completed`")


def test_with_several_ranks_missing_the_first_are_named() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    for rank in (0, 1, 3):
        trial = without_rank(trial, rank)
    assert judged("loss", trial).note == "no evidence from 3 ranks (0, 1, 3...); see `completed`"


@pytest.mark.parametrize("step", [1, 2, 3])
def test_with_a_step_missing_on_one_rank_nothing_passes(step: int) -> None:
    results = {result.check: result for result in judge(without_step(trial_of(tiny_case("fsdp_2")), 1, step))}
    left = [number for number in (1, 2, 3) if number != step]
    assert results["completed"].findings == (like(1, (1, 2, 3), tuple(left), quantity="optimizer steps"),)
    for name in NAMES[1:]:
        assert results[name] == Result(
            name, Verdict.UNKNOWN, note=f"no evidence from rank 1 of step {step}; see `completed`"
        )


def test_with_a_step_missing_in_the_reference_nothing_passes() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = replace(trial, reference=replace(trial.reference, steps=trial.reference.steps[:2]))
    for name in NAMES[1:]:
        note = "no evidence from the reference of step 3; see `completed`"
        assert judged(name, trial) == Result(name, Verdict.UNKNOWN, note=note)


def test_a_check_that_raises_is_unknown_and_says_where() -> None:
    def check_with_a_bug(_):
        raise KeyError("oops")

    result = run_check("loss", check_with_a_bug, trial_of(tiny_case("single")))
    line = check_with_a_bug.__code__.co_firstlineno + 1
    assert result == Result(
        "loss",
        Verdict.UNKNOWN,
        note=f"the check itself raised KeyError('oops') in check_with_a_bug (test_all.py:{line})",
    )


def test_a_check_that_examined_nothing_is_unknown() -> None:
    result = run_check("loss", lambda _: verdict_of("loss", [], 0), trial_of(tiny_case("single")))
    assert result == Result("loss", Verdict.UNKNOWN, note="nothing was examined")


def test_all_findings_are_kept() -> None:
    trial = trial_of(tiny_case("fsdp_2"), ran=tiny_case("ddp_2"))
    (told,) = [result for result in judge(trial) if result.check == "shard_contents"]
    found = told.findings
    assert len(found) > 9 and found == judged("shard_contents", trial).findings


def test_evidence_that_is_not_a_number_never_passes_a_check_of_numbers() -> None:
    def spoil(trial, rank):
        for step in trial.ranks[rank].steps:
            trial = with_step(
                trial,
                rank,
                step.step,
                microbatches=tuple(replace(m, loss_sum=float("nan")) for m in step.microbatches),
                reported_loss=float("nan"),
                grad_norm=float("nan"),
                gradients={fqn: np.full_like(g, np.nan) for fqn, g in step.gradients.items()},
                parameters={fqn: np.full_like(p, np.nan) for fqn, p in step.parameters.items()},
            )
        return trial

    trial = with_every_rank(trial_of(tiny_case("fsdp_2")), spoil)
    for name in ("loss", "reported_loss", "grad_norm", "gradients", "update"):
        assert judged(name, trial).verdict == Verdict.FAIL, name


# ---- the mistake that defines the project


@pytest.mark.parametrize("training", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_hsdp_that_ran_as_fsdp_breaks_the_checks_of_structure_and_no_check_of_numbers(training) -> None:
    requested, ran = tiny_case("hsdp_2x2", training), tiny_case(ParallelDims(dp_shard=4), training)
    verdicts = {
        result.check: str(result.verdict) for result in judge(trial_of(requested, ran)) if result.check in NAMES
    }
    assert verdicts == {
        "completed": "PASS",
        "collective_order": "PASS",
        "exchange": "NOT APPLICABLE",
        "features": "PASS",
        "memory": "FAIL",
        "placements": "FAIL",
        "process_groups": "PASS",
        "reshard": "FAIL",
        "settings": "PASS",
        "shard_contents": "FAIL",
        "traffic": "FAIL",
        "initial_weights": "PASS",
        "samples": "PASS",
        "determinism": "NOT APPLICABLE",
        "finite": "PASS",
        "golden": "PASS",
        "grad_norm": "PASS",
        "gradients": "PASS",
        "loss": "PASS",
        "replica_agreement": "UNKNOWN",
        "reported_loss": "PASS",
        "reported_rate": "PASS",
        "update": "PASS",
    }


def test_hsdp_that_ran_as_fsdp_is_described_by_its_shards_and_its_traffic() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"), tiny_case(ParallelDims(dp_shard=4)))
    assert judged("shard_contents", trial).findings[0] == like(
        0,
        Part(((0, 4), (0, 4)), (8, 4)),
        Part(((0, 2), (0, 4)), (8, 4)),
        name="tok_embeddings.weight",
        quantity="slice",
    )
    assert judged("memory", trial).findings[0] == like(0, 944, 472, step=1, unit="bytes", quantity="parameters")
    of_step_1 = [f for f in judged("traffic", trial).findings if (f.rank, f.step) == (0, 1)]
    assert {(f.kind, f.unit) for f in of_step_1} == {("collective", "bytes")}
    assert [(f.phase, f.name, f.axis, f.group, f.expected, f.observed) for f in of_step_1] == [
        ("backward", "all_gather", "dp_shard", (0, 1), 1600, 0),
        ("backward", "all_gather", "", (0, 1, 2, 3), 0, 1600),
        ("backward", "all_reduce", "dp_replicate", (0, 2), 944, 0),
        ("backward", "reduce_scatter", "dp_shard", (0, 1), 1888, 0),
        ("backward", "reduce_scatter", "", (0, 1, 2, 3), 0, 1888),
        ("forward", "all_gather", "dp_shard", (0, 1), 1888, 0),
        ("forward", "all_gather", "", (0, 1, 2, 3), 0, 1888),
    ]


# ---- what is seen at a glance


def test_a_parameter_that_is_not_finite_after_one_step_is_named() -> None:
    trial = with_value(trial_of(tiny_case("fsdp_2")), 1, 2, "parameters", "norm.weight", lambda value: value * np.inf)
    (finding,) = judged("finite", trial).findings
    assert (finding.rank, finding.step, finding.name) == (1, 2, "norm.weight")


@pytest.mark.parametrize("cut", ["tp", "cp"])
def test_an_axis_over_which_one_rank_moves_no_more_than_data_parallelism_does_is_named(cut: str) -> None:
    case = tiny_case(ParallelDims(tp=2)) if cut == "tp" else tiny_case(ParallelDims(cp=2), EIGHT)
    trial = trial_of(case)
    assert judged("exchange", trial).verdict is Verdict.PASS
    moved = trial.plan.flows_of(1, 2)
    kept = [sum(f.bytes for f in moved if (f.op, f.phase) == key and f.role in PARAMETER_ROLES) for key in KEYS]
    calls = [call for call in trial.ranks[1].collectives if call.phase == "other"]
    of_data = zip(KEYS, kept, strict=True)
    calls += [Collective(op, (0, 1), "(0, 1)", "float64", n, phase, 2, 0) for (op, phase), n in of_data if n]
    told = judged("exchange", with_rank(trial, 1, collectives=tuple(calls)))
    assert [(finding.rank, finding.axis) for finding in told.findings] == [(1, cut)]


def test_two_data_parallel_ranks_with_digests_alone_are_compared_by_them() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    unread = replace(trial.run, provided=RECORDED)
    assert judged("replica_agreement", replace(trial, run=unread)).verdict is Verdict.PASS
    other = with_value(trial, 1, 2, "parameters", "norm.weight", lambda value: value + 1)
    told = judged("replica_agreement", replace(other, run=replace(other.run, provided=RECORDED)))
    assert told.verdict is Verdict.FAIL and (told.findings[0].ranks, told.findings[0].step) == ((1,), 2)
