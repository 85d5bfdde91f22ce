"""The check `features` on literal evidence: what was requested and left no trace, and what nobody requested and took place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from checked import cause, found, like, with_activity
from literal import ADAMW, TINY, judged, tiny_case, trial_of, with_collectives, with_rank, with_step
from literal_ranks import APART

from harness.core.causes import diagnose
from harness.core.evidence.step import Call, Matmul, SavedTensorsHook
from harness.core.judge.finding import Limit
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.core.plan.traffic.flow import Flow
from harness.core.report.cause_text import diagnosis_line


def ran(requested: dict[str, Any], really: dict[str, Any]) -> Trial:
    return trial_of(tiny_case("fsdp_2", **requested), tiny_case("fsdp_2", **really))


# ---- activation checkpointing


def test_checkpointing_requested_and_never_seen_is_named() -> None:
    trial = ran({"activation_checkpointing": "full"}, {})
    assert found(trial)[:2] == [
        like(0, 1, 0, step=1, name="layers.0", quantity="recomputations"),
        like(0, 6, 0, step=1, quantity="matmuls in backward beyond planned gradients"),
    ]
    assert cause(trial) == {"activation_checkpointing": "none"}


def test_a_trainer_that_recomputes_to_the_end_of_a_block_is_told_so() -> None:
    """The last matmul of a block, w2's, is needed by no gradient."""
    case = tiny_case("fsdp_2", activation_checkpointing="full")
    early, late = (to_the_end(trial_of(case, traits=replace(APART, ac_early_stop=early))) for early in (True, False))
    assert found(early)[0] == like(0, 6, 7, step=1, quantity="matmuls in backward beyond planned gradients")
    assert found(late) == []


def to_the_end(trial: Trial) -> Trial:
    """One matmul more in every backward."""
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            seen = step.activity.matmuls
            trial = with_activity(
                trial,
                rank,
                step.step,
                matmuls=seen | {Matmul("backward", "float64"): seen[Matmul("backward", "float64")] + 1},
            )
    return trial


def test_checkpointing_that_nobody_requested_is_named() -> None:
    trial = ran({}, {"activation_checkpointing": "op"})
    assert found(trial)[0] == like(0, 0, 1, step=1, name="layers.0", quantity="recomputations")
    assert cause(trial) == {"activation_checkpointing": "op"}


def test_selective_checkpointing_that_kept_nothing_is_known_by_its_products_alone() -> None:
    trial = ran({"activation_checkpointing": "op"}, {"activation_checkpointing": "full"})
    assert found(trial)[0] == like(0, 3, 6, step=1, quantity="matmuls in backward beyond planned gradients")
    assert cause(trial) == {"activation_checkpointing": "full"}


def test_every_second_block_begins_with_the_second_so_that_a_single_block_is_left_alone() -> None:
    assert judged("features", trial_of(tiny_case("fsdp_2", activation_checkpointing="layer"))).verdict == Verdict.PASS
    wrong = ran({"activation_checkpointing": "layer"}, {"activation_checkpointing": "full"})
    assert cause(wrong) == {"activation_checkpointing": "full"}


def test_a_block_recomputed_in_one_step_of_three_is_not_enough() -> None:
    trial = trial_of(tiny_case("fsdp_2", activation_checkpointing="full"))
    calls = {Call("forward", "layers.0.attention.wq"): 1}
    trial = with_activity(
        trial, 1, 2, calls=calls, matmuls={Matmul("forward", "float64"): 8, Matmul("backward", "float64"): 16}
    )
    assert found(trial) == [
        like(1, 1, 0, step=2, name="layers.0", quantity="recomputations"),
        like(1, 6, 0, step=2, quantity="matmuls in backward beyond planned gradients"),
    ]
    assert cause(trial) == found(trial)[0]


def test_fused_projections_change_the_number_of_products_and_break_nothing() -> None:
    """Five matmuls a block (query, key and value in one, both of SwiGLU's in one), of which four are repeated."""
    trial = trial_of(tiny_case("fsdp_2", activation_checkpointing="full"))
    for rank in trial.ranks:
        for step in (1, 2, 3):
            fused = {Matmul("forward", "float64"): 6, Matmul("backward", "float64"): 16}
            trial = with_activity(trial, rank, step, matmuls=fused)
    assert found(trial) == []


def test_a_product_that_backward_lacks_is_told_as_such_and_not_as_one_recomputed() -> None:
    fewer = {Matmul("forward", "float64"): 8, Matmul("backward", "float64"): 15}
    trial = with_activity(trial_of(tiny_case("fsdp_2")), 1, 2, matmuls=fewer)
    assert found(trial) == [like(1, 16, 15, step=2, quantity="matmuls in backward")]


# ---- compile


def test_compile_requested_and_modules_called_one_by_one() -> None:
    trial = ran({"compile": True}, {})
    assert found(trial)[:2] == [
        like(0, Limit(least=1), 0, name="torch.compile", quantity="compiled graphs"),
        like(0, 0, 1, step=1, name="layers.0", quantity="calls of each module"),
    ]
    assert cause(trial) == {"compile": False}
    assert cause(ran({}, {"compile": True})) == {"compile": True}


def test_a_graph_break_is_told_with_its_reason() -> None:
    trial = trial_of(tiny_case("fsdp_2", compile=True))
    trial = with_rank(trial, 1, compiler={"graphs": 3, "graph break: call to print": 2})
    assert found(trial) == [like(1, None, "graph break: call to print", name="torch.compile", quantity="graph breaks")]
    assert cause(trial) == found(trial)[0]


def test_compiled_recomputation_is_known_by_its_products() -> None:
    trial = ran({"compile": True, "activation_checkpointing": "full"}, {"compile": True})
    assert {finding.quantity for finding in found(trial)} == {
        "matmuls in backward beyond planned gradients",
        "attention recomputed",
    }


# ---- wrappers, precision, dropout


def test_another_wrapper_than_the_one_requested_is_named() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    structure = {"": replace(trial.ranks[1].structure["layers.0"], kind="replicate")}
    assert found(with_rank(trial, 1, structure=structure)) == [
        like(1, "ddp", "replicate", quantity="data-parallel wrapper")
    ]


def test_gradients_reduced_in_another_dtype_are_seen() -> None:
    trial = with_collectives(trial_of(tiny_case("fsdp_2")), 0, lambda call: [replace(call, dtype="float32")])
    assert found(trial) == [like(0, "float64", "float32", quantity="dtype of reduced gradients")]


def test_products_in_another_dtype_are_seen() -> None:
    trial = with_activity(
        trial_of(tiny_case("single")),
        0,
        3,
        matmuls={Matmul("forward", "float64"): 8, Matmul("backward", "float32"): 16},
    )
    assert found(trial) == [like(0, "float64", "float32 and float64", step=3, quantity="matmuls' dtype")]


@pytest.mark.parametrize(
    ("requested", "really", "numbers"), [(0.1, 0.0, ("drawn", "none")), (0.0, 0.1, ("none", "drawn"))]
)
def test_dropout_is_seen_by_the_random_numbers_it_draws(
    requested: float, really: float, numbers: tuple[str, str]
) -> None:
    cases = [tiny_case("single", model=replace(TINY, dropout=p)) for p in (requested, really)]
    assert found(trial_of(*cases))[0] == like(0, *numbers, step=1, quantity="random numbers in forward")


def test_recomputation_that_began_with_another_random_state_explains_wrong_gradients() -> None:
    case = tiny_case("single", model=replace(TINY, dropout=0.1), activation_checkpointing="full")
    trial = with_activity(trial_of(case), 0, 2, random={"forward": 2, "backward": 2}, other_states={"layers.0": 1})
    gradients = {fqn: 1.5 * gradient for fqn, gradient in trial.ranks[0].steps[1].gradients.items()}
    trial = with_step(trial, 0, 2, gradients=gradients)
    told = diagnose(trial, [judged("gradients", trial)])
    assert told and diagnosis_line(told).startswith(
        "recomputation of layers.0 starts from another random state than forward"
    )


# ---- the plan of recomputation


def again(layout: str, kind: str, **changes: Any) -> list[tuple[str, int]]:
    flows = make_plan(tiny_case(layout, ADAMW, activation_checkpointing=kind, **changes)).flows[0]
    return [(flow.op, flow.bytes) for flow in flows if flow.role.startswith("recomputed")]


def test_fsdp_gathers_no_more_when_blocks_are_recomputed() -> None:
    plain = make_plan(tiny_case("fsdp_2")).flows[0]
    assert make_plan(tiny_case("fsdp_2", activation_checkpointing="full")).flows[0] == plain


def test_tensor_parallel_brings_activations_in_again_and_out_of_attention_only() -> None:
    # activation: 8 samples x 4 positions x 4 wide x 8 bytes = 1024
    assert again("tp_2", "full") == [("all_gather", 2048), ("reduce_scatter", 1024)]
    assert again("tp_2", "op") == [("all_gather", 2048)]
    assert again("tp_2", "full", sequence_parallel=False) == [("all_reduce", 1024)]
    assert again("tp_2", "op", sequence_parallel=False) == []
    dropout = replace(TINY, dropout=0.1)  # its mask comes after feed-forward's reduction
    assert again("tp_2", "full", sequence_parallel=False, model=dropout) == [("all_reduce", 2048)]
    assert again("tp_2", "layer", model=replace(TINY, n_layers=5)) == [("all_gather", 4096), ("reduce_scatter", 2048)]


def test_keys_and_values_go_round_again() -> None:
    case = replace(tiny_case("single", replace(ADAMW, seq_len=8)), name="cp")
    case = replace(case, dims=replace(case.dims, cp=4))

    def gone_round(kind: str, rotation: str) -> list[Flow]:
        features = replace(case.features, activation_checkpointing=kind, cp_rotation=rotation)
        flows = make_plan(replace(case, features=features)).flows[0]
        return [flow for flow in flows if flow.role == "recomputed keys and values"]

    assert gone_round("full", "allgather") == [Flow("cp", "recomputed keys and values", "all_gather", "backward", 4096)]
    assert gone_round("full", "alltoall") == [Flow("cp", "recomputed keys and values", "all_to_all", "backward", 3072)]
    assert gone_round("op", "allgather") == []


# ---- hooks on saved tensors


def test_recomputation_may_put_hooks_on_saved_tensors_and_nobody_else() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    hooks = {SavedTensorsHook("forward", "torch.utils.checkpoint", "_checkpoint_hook"): 1}
    assert found(with_activity(trial, 0, 1, saved=hooks)) == []
    trial = with_activity(
        trial, 1, 2, saved=hooks | {SavedTensorsHook("forward", "torch.autograd.graph", "save_on_cpu"): 2}
    )
    assert found(trial) == [
        like(1, (), ("torch.autograd.graph.save_on_cpu",), step=2, quantity="hooks on tensors saved for backward")
    ]
    assert cause(trial) == found(trial)[0]


# ---- compiled again


def graphs(trial: Trial, counts: tuple[int, ...]) -> Trial:
    for rank in trial.ranks:
        for step, count in enumerate(counts, 1):
            trial = with_step(trial, rank, step, graphs=count)
    return trial


def test_blocks_that_are_compiled_in_every_step_are_named() -> None:
    trial = graphs(trial_of(tiny_case("fsdp_2", compile=True)), (2, 4, 6))
    assert found(trial)[0] == like(0, 0, 2, step=3, name="torch.compile", quantity="graphs recompiled")
    assert cause(trial) == replace(found(trial)[0], ranks=(0, 1))


def test_a_limit_at_which_the_compiler_gives_up_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2", compile=True))
    trial = with_rank(trial, 1, compiler={"graphs": 2, "gave up: recompile limit exceeded": 1})
    assert found(trial) == [
        like(1, None, ("recompile limit exceeded",), name="torch.compile", quantity="limits reached")
    ]
    assert cause(trial) == found(trial)[0]


def test_the_second_step_and_a_new_length_may_compile() -> None:
    assert found(graphs(trial_of(tiny_case("fsdp_2", compile=True)), (2, 4, 4))) == []
    variable = replace(ADAMW, variable_length=True)
    assert found(graphs(trial_of(tiny_case("fsdp_2", variable, compile=True)), (2, 4, 5))) == []


def test_switches_of_fsdp2_are_noted_by_unit_and_break_nothing() -> None:
    trial, units = trial_of(tiny_case("fsdp_2")), trial_of(tiny_case("fsdp_2")).ranks[0].structure
    first = next(iter(units))
    said = {unit: ("cast_forward_inputs off",) for unit in units} | {first: ("cast_forward_inputs off", "x off")}
    result = judged("features", with_rank(trial, 1, switches=said))
    assert (result.verdict, judged("features", trial).note) == (Verdict.PASS, "")
    assert result.note == f"FSDP2: cast_forward_inputs off (all units); FSDP2: x off ({first})"
