"""The law `features` on literal evidence: what was requested and left no trace, and what nobody requested and did."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from literal import ADAMW, APART, TINY, cause_of, judged, tiny_case, trial_of, with_collectives, with_rank, with_step

from harness.checks.features import QUANTIZED_PRODUCTS
from harness.diagnosis import diagnose
from harness.judge.result import Finding, Verdict
from harness.judge.trial import Trial
from harness.plan.make_plan import make_plan
from harness.plan.traffic.flow import Flow
from harness.spec.dims import ParallelDims


def found(trial: Trial) -> list[Finding]:
    return list(judged("features", trial).findings)


def cause(trial: Trial) -> str:
    told = diagnose(trial, [judged("features", trial)])
    return cause_of(told) if told else ""


def with_activity(trial: Trial, rank: int, step: int, **changes: Any) -> Trial:
    record = trial.ranks[rank].steps[step - 1]
    return with_step(trial, rank, step, activity=replace(record.activity, **changes))


def ran(asked: dict[str, Any], really: dict[str, Any]) -> Trial:
    return trial_of(tiny_case("fsdp_2", **asked), tiny_case("fsdp_2", **really))


# ---- activation checkpointing


def test_checkpointing_asked_for_and_never_seen_is_named() -> None:
    trial = ran({"activation_checkpointing": "full"}, {})
    assert found(trial)[:2] == [
        Finding("rank 0, step 1, recomputations of layers.0", "1", "0"),
        Finding("rank 0, step 1, matmuls recomputed in backward", "6", "0"),
    ]
    assert cause(trial) == "activation checkpointing full is requested, none took place"


def test_a_trainer_that_recomputes_to_the_end_of_a_block_is_told_so() -> None:
    """The last matmul of a block, w2's, is needed by no gradient."""
    case = tiny_case("fsdp_2", activation_checkpointing="full")
    early, late = (to_the_end(trial_of(case, traits=replace(APART, ac_early_stop=early))) for early in (True, False))
    assert found(early)[0] == Finding("rank 0, step 1, matmuls recomputed in backward", "6", "7")
    assert found(late) == []


def to_the_end(trial: Trial) -> Trial:
    """One matmul more in every backward."""
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            seen = step.activity.matmuls
            trial = with_activity(
                trial, rank, step.step, matmuls=seen | {"backward float64": seen["backward float64"] + 1}
            )
    return trial


def test_checkpointing_that_nobody_asked_for_is_named() -> None:
    trial = ran({}, {"activation_checkpointing": "op"})
    assert found(trial)[0] == Finding("rank 0, step 1, recomputations of layers.0", "0", "1")
    assert cause(trial) == "activation checkpointing none is requested, op is observed"


def test_selective_checkpointing_that_kept_nothing_is_known_by_its_products_alone() -> None:
    trial = ran({"activation_checkpointing": "op"}, {"activation_checkpointing": "full"})
    assert found(trial)[0] == Finding("rank 0, step 1, matmuls recomputed in backward", "3", "6")
    assert cause(trial) == "activation checkpointing op is requested, full is observed"


def test_every_second_block_begins_with_the_second_so_that_a_single_block_is_left_alone() -> None:
    assert judged("features", trial_of(tiny_case("fsdp_2", activation_checkpointing="layer"))).verdict == Verdict.PASS
    wrong = ran({"activation_checkpointing": "layer"}, {"activation_checkpointing": "full"})
    assert cause(wrong) == "activation checkpointing layer is requested, full is observed"


def test_a_block_recomputed_in_one_step_of_three_is_not_enough() -> None:
    trial = trial_of(tiny_case("fsdp_2", activation_checkpointing="full"))
    calls = {"forward layers.0.attention.wq": 1}
    trial = with_activity(trial, 1, 2, calls=calls, matmuls={"forward float64": 8, "backward float64": 16})
    assert found(trial) == [
        Finding("rank 1, step 2, recomputations of layers.0", "1", "0"),
        Finding("rank 1, step 2, matmuls recomputed in backward", "6", "0"),
    ]
    told = "activation checkpointing full is in the wrong place"
    assert not cause(trial).startswith(told)  # the blocks are right; what is wrong is how often


def test_fused_projections_change_the_number_of_products_and_break_nothing() -> None:
    """Five matmuls a block (query, key and value in one, both of SwiGLU's in one), of which four are repeated."""
    trial = trial_of(tiny_case("fsdp_2", activation_checkpointing="full"))
    for rank in trial.ranks:
        for step in (1, 2, 3):
            fused = {"forward float64": 6, "backward float64": 16}
            trial = with_activity(trial, rank, step, matmuls=fused)
    assert found(trial) == []


# ---- compile


def test_compile_asked_for_and_modules_called_one_by_one() -> None:
    trial = ran({"compile": True}, {})
    assert found(trial)[:2] == [
        Finding("rank 0, torch.compile", "compiled graphs", "no compiled graph"),
        Finding("rank 0, step 1, calls of each module of layers.0", "0", "1"),
    ]
    assert cause(trial) == "compile is requested, no block ran compiled"
    assert cause(ran({}, {"compile": True})) == "compiled code ran, compile is not requested"


def test_a_graph_break_is_told_with_its_reason() -> None:
    trial = trial_of(tiny_case("fsdp_2", compile=True))
    trial = with_rank(trial, 1, compiler={"graphs": 3, "graph break: call to print": 2})
    assert found(trial) == [Finding("rank 1, torch.compile", "no graph break", "graph break: call to print")]
    assert cause(trial) == "compiled blocks break into pieces: graph break: call to print"


def test_compiled_recomputation_is_known_by_its_products() -> None:
    trial = ran({"compile": True, "activation_checkpointing": "full"}, {"compile": True})
    assert {finding.where.split(", ")[-1] for finding in found(trial)} == {
        "matmuls recomputed in backward",
        "attention recomputed",
    }


# ---- wrappers, precision, dropout


def test_another_wrapper_than_the_one_asked_for_is_named() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    structure = {"": trial.ranks[1].structure["layers.0"] | {"kind": "replicate"}}
    assert found(with_rank(trial, 1, structure=structure)) == [
        Finding("rank 1, data-parallel wrapper", "ddp", "replicate")
    ]


def test_gradients_reduced_in_another_dtype_are_seen() -> None:
    trial = with_collectives(trial_of(tiny_case("fsdp_2")), 0, lambda call: [replace(call, dtype="float32")])
    assert found(trial) == [Finding("rank 0, dtype of reduced gradients", "float64", "float32")]


def test_products_in_another_dtype_are_seen() -> None:
    trial = with_activity(trial_of(tiny_case("single")), 0, 3, matmuls={"forward float64": 8, "backward float32": 16})
    assert found(trial) == [Finding("rank 0, step 3, matmuls' dtype", "float64", "float32 and float64")]


@pytest.mark.parametrize(("asked", "really", "numbers"), [(0.1, 0.0, ("drawn", "none")), (0.0, 0.1, ("none", "drawn"))])
def test_dropout_is_seen_by_the_random_numbers_it_draws(asked: float, really: float, numbers: tuple[str, str]) -> None:
    cases = [tiny_case("single", model=replace(TINY, dropout=p)) for p in (asked, really)]
    where = "rank 0, step 1, random numbers in forward"
    assert found(trial_of(*cases))[0] == Finding(where, *numbers)


def test_recomputation_that_began_with_another_random_state_explains_wrong_gradients() -> None:
    case = tiny_case("single", model=replace(TINY, dropout=0.1), activation_checkpointing="full")
    trial = with_activity(trial_of(case), 0, 2, random={"forward": 2, "backward": 2, "other state layers.0": 1})
    gradients = {fqn: 1.5 * gradient for fqn, gradient in trial.ranks[0].steps[1].gradients.items()}
    trial = with_step(trial, 0, 2, gradients=gradients)
    told = diagnose(trial, [judged("gradients", trial)])
    assert told and told.cause.startswith("recomputation of layers.0 began with another random state than forward")


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


# ---- 8 bits


def quantized(recipe: str, matmuls: dict[str, int]) -> Trial:
    """One layer; `matmuls` alters what rank 1 did in step 2."""
    trial = trial_of(tiny_case("fsdp_2", training=replace(ADAMW, quantize=recipe)))
    format, backward = QUANTIZED_PRODUCTS[recipe]
    right = {f"forward {fqn} {format}": 1 for fqn in trial.plan.quantized}
    right |= {f"backward {fqn} {format}": backward for fqn in trial.plan.quantized}
    for rank in trial.ranks:
        for step in (1, 2, 3):
            trial = with_activity(trial, rank, step, quantized=right)
    return with_activity(trial, 1, 2, quantized={k: v for k, v in (right | matmuls).items() if v})


@pytest.mark.parametrize("recipe", QUANTIZED_PRODUCTS)
def test_products_of_all_blocks_in_the_format_asked_for_pass(recipe: str) -> None:
    assert judged("features", quantized(recipe, {})).verdict is Verdict.PASS


def test_a_module_that_was_left_out_of_the_conversion_is_named() -> None:
    missing = {f"{phase} layers.0.feed_forward.w2 mxfp8": 0 for phase in ("forward", "backward")}
    assert found(quantized("mxfp8", missing)) == [
        Finding("rank 1, step 2, mxfp8 matmuls of layers.0.feed_forward.w2 in backward", "2", "0"),
        Finding("rank 1, step 2, mxfp8 matmuls of layers.0.feed_forward.w2 in forward", "1", "0"),
    ]


def test_a_module_that_was_converted_too_is_named() -> None:
    trial = quantized("float8_rowwise", {"forward output float8_rowwise": 1})
    assert found(trial) == [Finding("rank 1, step 2, float8_rowwise matmuls of output in forward", "0", "1")]
    assert cause(trial) == "float8_rowwise matmuls of output, which nobody requested"


def test_a_conversion_that_did_not_take_place_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2", training=replace(ADAMW, quantize="float8_rowwise")))
    assert cause(trial) == "float8_rowwise is requested, no matmul ran in that format"


# ---- attention


@pytest.mark.parametrize(
    ("changed", "finding"),
    [
        ({"forward attention": 2}, Finding("rank 0, step 1, attention in forward", "1", "2")),
        ({"backward attention": 1}, Finding("rank 0, step 1, attention recomputed", "0", "1")),
        ({"backward attention_backward": 2}, Finding("rank 0, step 1, attention's gradients", "1", "2")),
        ({"forward batched matmul": 2}, Finding("rank 0, step 1, batched matmuls", "at most 1", "2")),
    ],
)
def test_attention_that_is_done_once_too_often_is_seen(changed: dict[str, int], finding: Finding) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    seen = trial.ranks[0].steps[0].activity.attention
    assert found(with_activity(trial, 0, 1, attention=seen | changed)) == [finding]


def test_attention_is_done_for_each_part_of_the_sequence_that_a_rank_may_look_at() -> None:
    for balanced, parts in ((True, (2, 2)), (False, (1, 2))):
        trial = trial_of(tiny_case(ParallelDims(cp=2), cp_load_balance=balanced))
        for rank, count in enumerate(parts):
            right = {"forward attention": count, "backward attention_backward": count}
            for step in (1, 2, 3):
                trial = with_activity(trial, rank, step, attention=right)
        assert found(trial) == []
        for rank in trial.ranks:
            assert len(found(with_activity(trial, rank, 1, attention={key: 3 for key in right}))) == 2


MATMULS = {"forward batched matmul": 2, "backward batched matmul": 4}


def all_attend(trial: Trial, attention: dict[str, int]) -> Trial:
    for rank, step in itertools.product(trial.ranks, (1, 2, 3)):
        trial = with_activity(trial, rank, step, attention=attention)
    return trial


def test_a_table_of_angles_breaks_nothing() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    seen = trial.ranks[0].steps[0].activity.attention
    assert found(with_activity(trial, 0, 1, attention=seen | {"forward batched matmul": 1})) == []


def test_a_trainer_whose_attention_is_plain_matmuls_everywhere_is_right() -> None:
    assert found(all_attend(trial_of(tiny_case("fsdp_2")), MATMULS)) == []
    assert found(all_attend(trial_of(tiny_case("fsdp_2")), {})) == []  # flex attention is one kernel of its own


def test_fused_attention_that_was_requested_and_fell_back_to_matmuls_is_named() -> None:
    trial = all_attend(trial_of(tiny_case("fsdp_2"), traits=replace(APART, attention="fused")), MATMULS)
    assert found(trial)[:3] == [
        Finding("rank 0, step 1, attention in forward", "1", "0"),
        Finding("rank 0, step 1, attention's gradients", "1", "0"),
        Finding("rank 0, step 1, batched matmuls", "at most 1", "6"),
    ]
    told = "attention falls back to plain matmuls: 0 fused kernels in forward, requested 1, and 6 batched matmuls"
    assert cause(trial) == f"{told} (rank 0, step 1)"


def test_attention_that_falls_back_in_one_step_of_one_rank_is_named_whoever_chose_it() -> None:
    trial = with_activity(trial_of(tiny_case("fsdp_2")), 1, 2, attention=MATMULS)
    assert [finding.where for finding in found(trial)][0] == "rank 1, step 2, attention in forward"
    assert cause(trial).endswith("and 6 batched matmuls (rank 1, step 2)")


def test_gpus_have_no_fused_attention_in_float64() -> None:
    trial = all_attend(trial_of(tiny_case("fsdp_2"), traits=replace(APART, attention="fused")), MATMULS)
    for rank in trial.ranks:
        trial = with_rank(trial, rank, environment={"device": "NVIDIA H200"})
    assert found(trial) == []


def test_attention_computed_twice_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    seen = trial.ranks[0].steps[0].activity.attention
    trial = with_activity(trial, 0, 1, attention=seen | {"forward attention": 2})
    assert cause(trial) == "attention is computed 2 times in forward (rank 0, step 1), once is needed"


# ---- what is computed besides


@pytest.mark.parametrize("phase", ["other", "pipeline", "optimizer"])
def test_a_second_pass_of_the_bare_model_is_named(phase: str) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    record = trial.ranks[0].steps[1].activity
    matmuls, calls = record.matmuls | {f"{phase} float64": 8}, record.calls | {f"{phase} layers.0": 1}
    trial = with_activity(trial, 0, 2, matmuls=matmuls, calls=calls)
    assert found(trial) == [Finding("rank 0, step 2, matmuls besides training passes", "0", "8")]
    told = "8 matmuls, some in its blocks, outside of forward and backward (rank 0, step 2)"
    assert cause(trial) == f"the model runs besides its training passes: {told}"


def two_layers(case: dict[str, Any]) -> Trial:
    """Forward without the output's matmul, which a loss does in two chunks: 2 x 7 of blocks, and 2 beside them."""
    trial = trial_of(tiny_case("fsdp_2", model=replace(TINY, n_layers=2)))
    for rank, step in itertools.product(trial.ranks, (1, 2, 3)):
        calls = {f"forward layers.{layer}": 1 for layer in (0, 1)} | {
            f"forward layers.{layer}.attention.wq": 1 for layer in (0, 1)
        }
        attention = {"forward attention": 2, "backward attention_backward": 2}
        trial = with_activity(trial, rank, step, calls=calls, attention=attention, **case)
    return trial


def test_a_loss_that_projects_to_the_vocabulary_itself_is_no_second_pass() -> None:
    matmuls = {"forward float64": 14, "other float64": 2, "backward float64": 32}
    assert found(two_layers({"matmuls": matmuls})) == []
    assert found(two_layers({"matmuls": matmuls | {"backward float64": 34}})) == []  # the chunks are recomputed
    fused = {"forward float64": 14, "other float64": 6, "backward float64": 28}  # their gradients are computed at once
    assert found(two_layers({"matmuls": fused})) == []
    assert "recomputed in backward" in found(two_layers({"matmuls": matmuls | {"backward float64": 35}}))[0].where
    whole = {"forward float64": 15, "other float64": 2, "backward float64": 30}
    assert "besides" in found(two_layers({"matmuls": whole}))[0].where


# ---- hooks on saved tensors


def test_recomputation_may_put_hooks_on_saved_tensors_and_nobody_else() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    hooks = {"forward torch.utils.checkpoint _checkpoint_hook": 1}
    assert found(with_activity(trial, 0, 1, saved=hooks)) == []
    trial = with_activity(trial, 1, 2, saved=hooks | {"forward torch.autograd.graph save_on_cpu": 2})
    where = "rank 1, step 2, hooks on tensors saved for backward"
    assert found(trial) == [Finding(where, "none", "torch.autograd.graph.save_on_cpu")]
    told = "activations saved for backward go through torch.autograd.graph.save_on_cpu, which nobody requested"
    assert cause(trial) == f"{told} on rank 1"


# ---- compiled again


def graphs(trial: Trial, counts: tuple[int, ...]) -> Trial:
    for rank in trial.ranks:
        for step, count in enumerate(counts, 1):
            trial = with_step(trial, rank, step, graphs=count)
    return trial


def test_blocks_that_are_compiled_in_every_step_are_named() -> None:
    trial = graphs(trial_of(tiny_case("fsdp_2", compile=True)), (2, 4, 6))
    assert found(trial)[0] == Finding("rank 0, step 3, graphs compiled anew", "0", "2")
    assert cause(trial) == "blocks are compiled anew in step 3 (graphs on rank 0: 2)"


def test_a_limit_at_which_the_compiler_gives_up_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2", compile=True))
    trial = with_rank(trial, 1, compiler={"graphs": 2, "gave up: recompile limit exceeded": 1})
    assert found(trial) == [Finding("rank 1, torch.compile", "no limit reached", "recompile limit exceeded")]
    assert cause(trial) == "torch.compile gave up and leaves blocks to run eagerly: recompile limit exceeded"


def test_the_second_step_and_a_new_length_may_compile() -> None:
    assert found(graphs(trial_of(tiny_case("fsdp_2", compile=True)), (2, 4, 4))) == []
    variable = replace(ADAMW, variable_length=True)
    assert found(graphs(trial_of(tiny_case("fsdp_2", variable, compile=True)), (2, 4, 5))) == []
