"""YAML that a report prints for what a trainer may choose: pasted into the case, it makes the failing check pass."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import yaml
from checked import with_activity
from literal import TINY, judged, tiny_case, trial_of, with_rank, with_step
from literal_ranks import APART

from harness.core.case.allowance import Allowance
from harness.core.case.case import to_json
from harness.core.case.loading import from_json
from harness.core.causes import diagnose
from harness.core.causes.declarable import IF_INTENDED, trial_of_case
from harness.core.checks import judge
from harness.core.evidence.records import Collective, HeldTensor
from harness.core.evidence.step import Attention, Call, Matmul, SavedTensorsHook
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan

KNOWN = Allowance("copied", 8, "their norm is logged")
FUSED = {Attention("forward", "attention"): 2, Attention("backward", "attention_backward"): 2}
WRITTEN_OUT = {Attention("forward", "batched matmul"): 4, Attention("backward", "batched matmul"): 8}
BLOCKS = {Call("forward", f"layers.{layer}{part}"): 1 for layer in (0, 1) for part in ("", ".attention.wq")}


def computing(trial: Trial, **activity: Any) -> Trial:
    for rank, step in itertools.product(trial.ranks, (1, 2, 3)):
        trial = with_activity(trial, rank, step, **activity)
    return trial


def of_two_layers(*, outputs: int, calls: int, recomputed: int = 0, **more: Any) -> Trial:
    """Forward has the matmuls of two blocks, and so many of the output."""
    case = tiny_case("fsdp_2", model=replace(TINY, n_layers=2), **more)
    known = BLOCKS | ({Call("forward", "output"): calls} if calls else {})
    known |= {Call("backward", "output"): recomputed} if recomputed else {}
    forward = 14 + outputs
    matmuls = {Matmul("forward", "float64"): forward, Matmul("backward", "float64"): 2 * forward + recomputed}
    return computing(trial_of(case, traits=APART), calls=known, matmuls=matmuls, attention=FUSED)


def with_attention_written_out() -> Trial:
    trial = of_two_layers(outputs=1, calls=1)
    trial = replace(trial, plan=replace(trial.plan, traits=replace(trial.traits, attention="fused")))
    return computing(trial, attention=WRITTEN_OUT)


def keeping(*allow: Allowance) -> Trial:
    """Rank 1 keeps two slices and copies: the one is allowed, the other is not."""
    trial = trial_of(tiny_case("fsdp_2", allow=allow))
    trial = with_step(trial, 1, 2, copied={"other": 264})
    return with_rank(trial, 1, held=(HeldTensor((4, 4), "float64", 700),))


def hooked() -> Trial:
    hook = SavedTensorsHook("forward", "corp.offload", "Offload.<locals>.pack")
    return with_activity(trial_of(tiny_case("fsdp_2")), 1, 2, saved={hook: 3})


def pasted(trial: Trial, line: str) -> Trial:
    """The trial of the case with this line among its keys."""
    return trial_of_case(trial, from_json(to_json(trial.case) | yaml.safe_load(line)))


@pytest.mark.slow("many of a kind; the first run in the same way", after=3)
@pytest.mark.parametrize(
    ("trial", "check", "declared"),
    [
        (with_attention_written_out(), "features", {"traits": {"attention": None}}),
        (of_two_layers(outputs=4, calls=4), "features", {"traits": {"loss_chunks": 4, "loss_in_forward": True}}),
        (of_two_layers(outputs=4, calls=0), "features", {"traits": {"loss_chunks": 4, "loss_in_forward": True}}),
        (of_two_layers(outputs=1, calls=1, recomputed=1), "features", {"traits": {"recomputes_output": True}}),
        (
            of_two_layers(outputs=4, calls=4, traits=(("own_model", True),)),
            "features",
            {"traits": {"own_model": True, "loss_chunks": 4, "loss_in_forward": True}},
        ),
        (hooked(), "features", None),
        (keeping(KNOWN), "memory", None),
    ],
)
def test_the_line_that_is_printed_makes_the_check_pass_where_it_is_pasted(trial, check, declared):
    assert judged(check, trial).verdict is Verdict.FAIL
    diagnosis = diagnose(trial, judge(trial))
    assert diagnosis is not None
    (line,) = [text for label, text in diagnosis.evidence if label == IF_INTENDED]
    assert declared is None or yaml.safe_load(line) == declared
    assert judged(check, pasted(trial, line)).verdict is Verdict.PASS


def test_what_the_case_allows_already_stands_in_the_line():
    diagnosis = diagnose(keeping(KNOWN), judge(keeping(KNOWN)))
    assert diagnosis is not None
    (line,) = [text for label, text in diagnosis.evidence if label == IF_INTENDED]
    assert [entry["what"] for entry in yaml.safe_load(line)["allow"]] == ["copied", "kept"]


def test_what_two_checks_ask_for_stands_in_one_key_that_can_be_pasted() -> None:
    hook = SavedTensorsHook("forward", "corp.offload", "Offload.<locals>.pack")
    trial = with_activity(keeping(KNOWN), 1, 2, saved={hook: 3})
    (line,) = printed(trial)
    assert sorted(entry["what"] for entry in yaml.safe_load(line)["allow"]) == ["copied", "hooks", "kept"]
    assert all(judged(check, trial).verdict is Verdict.FAIL for check in ("features", "memory"))
    assert all(judged(check, pasted(trial, line)).verdict is Verdict.PASS for check in ("features", "memory"))


def test_attention_that_is_one_kernel_in_some_layers_only_is_not_answered_with_a_trait():
    trial = computing(with_attention_written_out(), attention={**WRITTEN_OUT, Attention("forward", "attention"): 1})
    diagnosis = diagnose(trial, judge(trial))
    assert diagnosis is not None
    assert not [text for label, text in diagnosis.evidence if label == IF_INTENDED]


# ---- traffic


def moving_more(op: str, phase: str, by: int) -> Trial:
    trial = trial_of(tiny_case("tp_2", sequence_parallel=False))
    for rank, evidence in trial.ranks.items():
        first = next(call for call in evidence.collectives if (call.op, call.phase, call.step) == (op, phase, 2))
        more = replace(first, bytes=by)
        trial = with_rank(trial, rank, collectives=(*evidence.collectives, more))
    return trial


def printed(trial: Trial) -> list[str]:
    diagnosis = diagnose(trial, judge(trial))
    assert diagnosis is not None
    return [text for label, text in diagnosis.evidence if label == IF_INTENDED]


def test_sums_over_tp_beyond_the_plan_are_answered_with_the_line_where_nothing_else_fails():
    trial = moving_more("all_reduce", "backward", 1024)
    (line,) = printed(trial)
    (entry,) = yaml.safe_load(line)["allow"]
    wanted = {"what": "moved", "op": "all_reduce", "phase": "backward", "axis": "tp", "bytes": 1024}
    assert {key: entry[key] for key in wanted} == wanted
    assert judged("traffic", pasted(trial, line)).verdict is Verdict.PASS
    assert judged("traffic", pasted(moving_more("all_reduce", "backward", 1032), line)).verdict is Verdict.FAIL


def test_no_line_is_printed_for_sums_that_lack():
    trial = trial_of(tiny_case("tp_2", sequence_parallel=False))
    for rank, evidence in trial.ranks.items():
        kept = tuple(call for call in evidence.collectives if (call.op, call.phase) != ("all_reduce", "backward"))
        trial = with_rank(trial, rank, collectives=kept)
    assert printed(trial) == []


def test_a_forward_pass_that_gathers_for_the_first_microbatch_alone_is_answered_with_the_trait():
    case = tiny_case("fsdp_2", accumulation=2)
    trial = trial_of(case)
    kept = make_plan(case, replace(trial.traits, keeps_over_accumulation=True)).flows
    gathered = {rank: kept[rank][0].bytes for rank in trial.ranks}
    for rank, evidence in trial.ranks.items():
        calls, seen = list[Collective](), dict[int, int]()
        for call in evidence.collectives:
            if (call.op, call.phase) == ("all_gather", "forward"):
                call = replace(call, bytes=min(call.bytes, gathered[rank] - seen.get(call.step, 0)))
                seen[call.step] = seen.get(call.step, 0) + call.bytes
            calls.append(call)
        trial = with_rank(trial, rank, collectives=tuple(calls))
    (line,) = printed(trial)
    assert yaml.safe_load(line) == {"traits": {"keeps_over_accumulation": True}}
    assert judged("traffic", pasted(trial, line)).verdict is Verdict.PASS


def test_a_barrier_beside_sums_outside_of_passes_is_no_part_of_the_line():
    trial = trial_of(tiny_case("ddp_2"))
    for rank, evidence in trial.ranks.items():
        calls = evidence.collectives
        summed = Collective("all_reduce", (0, 1), "(0, 1)", "float64", 4096, "other", 1, len(calls))
        waited = Collective("barrier", (0, 1), "(0, 1)", "uint8", 0, "other", 1, len(calls) + 1)
        trial = with_rank(trial, rank, collectives=(*calls, summed, waited))
    (line,) = printed(trial)
    (entry,) = yaml.safe_load(line)["allow"]
    assert (entry["op"], entry["axis"], entry["phase"]) == ("all_reduce", "dp_replicate", "outside")
    assert judged("traffic", pasted(trial, line)).verdict is Verdict.PASS
