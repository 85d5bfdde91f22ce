"""What a case or an adapter allows besides the plan: how it is written, what it covers, and that nothing more passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml
from checked import with_activity
from literal import judged, tiny_case, trial_of, with_rank, with_step
from literal_ranks import APART

from harness.core import trainers
from harness.core.case.allowance import Allowance, declaration
from harness.core.case.case import Case, CaseError, to_json
from harness.core.case.loading import from_json
from harness.core.case.traits import TrainerTraits
from harness.core.evidence.records import Collective, HeldTensor
from harness.core.evidence.step import Attention, Matmul, SavedTensorsHook
from harness.core.judge.finding import Limit
from harness.core.judge.result import Verdict
from harness.core.judge.traffic import observed_bytes_outside
from harness.core.judge.trial import Trial

AVERAGE = Allowance("kept", "1 x parameters", "a moving average of the weights")
AVERAGED = Allowance("computed", matmuls="1 x forward", reason="the average is evaluated")
LOGGED = Allowance("moved", 8, "the loss is logged", op="all_reduce", phase="forward", axis="world")


def allowing(trial: Trial, *allow: Allowance) -> Trial:
    return replace(trial, case=replace(trial.case, allow=allow))


def averaging(size: int) -> Trial:
    """Rank 1 keeps as many bytes in the shape of a slice."""
    return with_rank(trial_of(tiny_case("fsdp_2")), 1, held=(HeldTensor((4, 4), "float64", size),))


def test_a_moving_average_is_kept_where_that_is_allowed_and_no_more_than_that() -> None:
    own = sum(tensor.value.nbytes for tensor in trial_of(tiny_case("fsdp_2")).ranks[1].parameters)
    assert judged("memory", averaging(own)).verdict is Verdict.FAIL
    passed = judged("memory", allowing(averaging(own), AVERAGE))
    assert (passed.verdict, passed.note) == (
        Verdict.PASS,
        "allow: [{what: kept, bytes: 1 x parameters, reason: a moving average of the weights}]",
    )
    most = own + 128
    assert judged("memory", allowing(averaging(most), AVERAGE)).verdict is Verdict.PASS
    assert judged("memory", allowing(averaging(most + 8), AVERAGE)).verdict is Verdict.FAIL


def test_an_allowance_that_nobody_uses_is_said_to_be() -> None:
    unused = judged("memory", allowing(trial_of(tiny_case("fsdp_2")), AVERAGE))
    assert (unused.verdict, unused.note.endswith(", not used")) == (Verdict.PASS, True)
    assert judged("traffic", allowing(trial_of(tiny_case("fsdp_2")), LOGGED)).note.endswith(", not used")


def test_copies_within_a_step_are_allowed_in_bytes() -> None:
    trial = with_step(trial_of(tiny_case("fsdp_2")), 1, 2, copied={"other": 356})
    assert judged("memory", allowing(trial, Allowance("copied", 100, "their norm is logged"))).verdict is Verdict.PASS
    assert judged("memory", allowing(trial, Allowance("copied", 99, "their norm is logged"))).verdict is Verdict.FAIL


def logging(size: int) -> Trial:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank, evidence in trial.ranks.items():
        call = Collective("all_reduce", (0, 1), "(0, 1)", "float64", size, "forward", 2, 999)
        trial = with_rank(trial, rank, collectives=(*evidence.collectives, call))
    return trial


def test_a_logging_all_reduce_inside_forward_is_moved_where_that_is_allowed_and_no_more() -> None:
    assert judged("traffic", logging(8)).verdict is Verdict.FAIL
    passed = judged("traffic", allowing(logging(8), LOGGED))
    assert (passed.verdict, passed.note) == (
        Verdict.PASS,
        declaration([LOGGED]),
    )
    first = judged("traffic", allowing(logging(16), LOGGED)).findings[0]
    assert (first.rank, first.step, first.phase, first.name) == (0, 2, "forward", "all_reduce")
    assert (first.axis, first.group, first.expected, first.observed) == ("dp_shard", (0, 1), 0, 16)
    assert judged("traffic", allowing(logging(8), replace(LOGGED, phase="backward"))).verdict is Verdict.FAIL


def sending_batches(size: int, phase: str = "other") -> Trial:
    """In step 2 the first rank sends integers to the other, beside as many bytes as losses and norms may take."""
    trial = trial_of(tiny_case("fsdp_2"))
    for rank, evidence in trial.ranks.items():
        room = trial.plan.outside_bytes[rank] - sum(observed_bytes_outside(evidence, 2).values())
        usual = Collective("all_reduce", (0, 1), "(0, 1)", "float64", room, "other", 2, 998)
        call = Collective("broadcast", (0, 1), "(0, 1)", "int64", size, phase, 2, 999)
        trial = with_rank(trial, rank, collectives=(*evidence.collectives, usual, call))
    return trial


@pytest.mark.parametrize(("phase", "where"), [("other", "outside"), ("optimizer", "outside"), ("forward", "forward")])
def test_a_batch_that_is_sent_to_peers_is_moved_where_that_is_allowed_and_no_more(phase: str, where: str) -> None:
    allow = Allowance("moved", 64, "the first rank reads the batch", op="broadcast", phase=where, axis="dp_shard")
    assert judged("traffic", sending_batches(64, phase)).verdict is Verdict.FAIL
    assert judged("traffic", allowing(sending_batches(64, phase), allow)).verdict is Verdict.PASS
    assert judged("traffic", allowing(sending_batches(65, phase), allow)).verdict is Verdict.FAIL
    assert (
        judged("traffic", allowing(sending_batches(64, phase), replace(allow, op="all_gather"))).verdict is Verdict.FAIL
    )


def test_what_a_checkpoint_moves_between_passes_is_no_part_of_a_step() -> None:
    assert judged("traffic", sending_batches(10_000, "checkpoint")).verdict is Verdict.PASS


def test_graphs_are_compiled_where_that_is_allowed_and_no_more() -> None:
    trial = with_rank(trial_of(tiny_case("fsdp_2")), 1, compiler={"graphs": 2, "graph break: call to print": 1})
    assert judged("features", trial).verdict is Verdict.FAIL
    allow = Allowance("compiled", graphs=2, reason="the activation is one kernel")
    assert judged("features", allowing(trial, allow)).verdict is Verdict.PASS
    (finding,) = judged("features", allowing(trial, replace(allow, graphs=1))).findings
    assert (finding.rank, finding.name) == (1, "torch.compile")


def test_hooks_on_saved_tensors_are_allowed_by_name() -> None:
    hook = SavedTensorsHook("forward", "torch.autograd.graph", "save_on_cpu")
    trial = with_activity(trial_of(tiny_case("fsdp_2")), 1, 2, saved={hook: 3})
    assert [finding.rank for finding in judged("features", trial).findings] == [1]
    allow = Allowance("hooks", name="torch.autograd.graph.save_on_cpu", reason="activations wait in host memory")
    assert judged("features", allowing(trial, allow)).verdict is Verdict.PASS
    assert judged("features", allowing(trial, replace(allow, name="other.hooks"))).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    "allow",
    [
        Allowance("kept", 8, "why"),
        Allowance("copied", "2 x parameters", "why"),
        replace(LOGGED, reason="why", phase="outside"),
        Allowance("computed", matmuls=4, reason="why"),
        Allowance("compiled", graphs=2, reason="why"),
        Allowance("hooks", name="torch.autograd.graph.save_on_cpu", reason="why"),
        Allowance("hooks", name="train.Offload.<locals>.pack", reason="why: {so}, [it] is # 'needed'"),
        Allowance("hooks", name="null", reason="off"),
    ],
)
def test_the_line_that_declares_an_allowance_is_read_as_that(allow: Allowance) -> None:
    stored = to_json(tiny_case("fsdp_2")) | yaml.safe_load(declaration([allow, AVERAGE]))
    assert from_json(stored).allow == (allow, AVERAGE)


def averaged_model(matmuls: int, batched: int = 0) -> Trial:
    """On rank 1 another model computes after step 2."""
    trial = trial_of(tiny_case("fsdp_2"))
    known = trial.ranks[1].steps[1].activity
    attention = known.attention | ({Attention("other", "batched matmul"): batched} if batched else {})
    more = known.matmuls | {Matmul("other", "float64"): matmuls}
    return with_activity(trial, 1, 2, matmuls=more, attention=attention)


def test_what_another_model_computes_is_allowed_in_matmuls_and_no_more() -> None:
    forward = trial_of(tiny_case("fsdp_2")).ranks[1].steps[1].activity.matmuls[Matmul("forward", "float64")]
    assert judged("features", averaged_model(forward)).findings[0].quantity == "matmuls outside training passes"
    for allow in (AVERAGED, replace(AVERAGED, matmuls=forward)):
        passed = judged("features", allowing(averaged_model(forward), allow))
        assert (passed.verdict, passed.note) == (
            Verdict.PASS,
            declaration([allow]),
        )
        (finding,) = judged("features", allowing(averaged_model(forward + 1), allow)).findings
        assert (finding.expected, finding.observed) == (Limit(most=forward), forward + 1)
    unused = judged("features", allowing(trial_of(tiny_case("fsdp_2")), AVERAGED))
    assert (unused.verdict, unused.note.endswith(", not used")) == (Verdict.PASS, True)


def test_batched_matmuls_of_another_model_count_with_its_others() -> None:
    allow = replace(AVERAGED, matmuls=8)
    assert judged("features", allowing(averaged_model(4, batched=4), allow)).verdict is Verdict.PASS
    assert judged("features", allowing(averaged_model(4, batched=5), allow)).verdict is Verdict.FAIL


@pytest.mark.parametrize("name", ["llama3", "transformers"])
def test_an_adapter_made_of_one_that_is_here_adds_its_allowance(name: str) -> None:
    theirs: Any = type(trainers.load_adapter(name))

    class Mine(theirs):
        def traits(self, case: Case) -> TrainerTraits:
            return replace(super().traits(case), allow=(AVERAGED,))

    case = tiny_case("fsdp_2")
    assert trial_of(case, traits=Mine().traits(case)).allow == (AVERAGED,)


def test_an_adapter_declares_its_own_beside_those_of_the_case() -> None:
    trial = trial_of(replace(tiny_case("fsdp_2"), allow=(LOGGED,)), traits=replace(APART, allow=(AVERAGE,)))
    assert trial.allow == (LOGGED, AVERAGE)
    assert judged("memory", trial).note == declaration([AVERAGE]) + ", not used"


def test_allowances_are_stored_with_the_case() -> None:
    case = replace(tiny_case("fsdp_2"), allow=(AVERAGE, LOGGED))
    assert from_json(to_json(case)).allow == (AVERAGE, LOGGED)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"what": "kept", "bytes": 8}, "entry 1: reason is missing"),
        ({"what": "kept", "bytes": 8, "reason": " "}, "entry 1: reason is missing"),
        ({"what": "kept", "reason": "why"}, "entry 1: bytes 0: a number above 0, or 'N x parameters'"),
        ({"what": "kept", "bytes": "all", "reason": "why"}, "entry 1: bytes 'all': a number above 0"),
        ({"what": "kept", "bytes": True, "reason": "why"}, "entry 1: bytes: expected int | str, got True"),
        (
            {"what": "any", "bytes": 8, "reason": "why"},
            "what 'any': choose one of kept, gathered, copied, moved, computed",
        ),
        ({"what": "computed", "bytes": 8, "reason": "why"}, "entry 1: computed has no bytes: say matmuls"),
        ({"what": "kept", "bytes": 8, "matmuls": 8, "reason": "why"}, "entry 1: kept has no matmuls: say bytes"),
        ({"what": "computed", "matmuls": "all", "reason": "why"}, "matmuls 'all': a number above 0, or 'N x forward'"),
        ({"what": "moved", "bytes": 8, "reason": "why", "op": "all_reduce"}, "moved needs op, phase and axis"),
        (
            {"what": "moved", "bytes": 8, "reason": "why", "op": "all_gather", "phase": "other", "axis": "dp_shard"},
            "phase 'other': choose one of forward, backward, pipeline, outside",
        ),
        ({"what": "kept", "bytes": 8, "reason": "why", "op": "all_reduce"}, "kept has no op, phase or axis"),
        ({"what": "hooks", "reason": "why"}, "entry 1: name is required"),
        ({"what": "compiled", "graphs": 0, "reason": "why"}, "graphs 0: a number above 0"),
        ({"what": "compiled", "bytes": 8, "graphs": 1, "reason": "why"}, "compiled has no bytes: say graphs"),
        ({"what": "kept", "byte": 8, "reason": "why"}, "entry 1: unknown key 'byte' (did you mean 'bytes'?)"),
    ],
)
def test_an_allowance_without_reason_or_limit_is_refused_with_its_key(entry, problem: str) -> None:
    record = to_json(tiny_case("fsdp_2")) | {"allow": [entry], "name": "mine", "file": "cases/mine.yaml"}
    with pytest.raises(CaseError, match="cases/mine.yaml: case 'mine': allow: ") as refused:
        from_json(record)
    assert problem in str(refused.value)
