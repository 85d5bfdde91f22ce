"""What a step computed otherwise than requested, told by its traces alone. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from diagnosed import DDP_2, accumulating, here, seen, seen_text
from literal import ADAMW, TINY, judged, tiny_case, trial_of, with_collectives, with_every_rank, with_rank, with_step
from noisy import noise_of, with_noise

from harness.diagnosis.features import _noise, odd_traces, other_actions
from harness.evidence.records import Collective
from harness.evidence.step import Activity, Attention, Call, Matmul, SavedTensorsHook
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims

FULL = trial_of(tiny_case("ddp_2", activation_checkpointing="full"))
COMPILED = trial_of(tiny_case("ddp_2", compile=True))


def computing(
    trial: Trial, change: Callable[[Activity], Activity], ranks: tuple[int, ...] = (0, 1), since: int = 1
) -> Trial:
    for rank in ranks:
        for step in trial.ranks[rank].steps[since - 1 :]:
            trial = with_step(trial, rank, step.step, activity=change(step.activity))
    return trial


def also(what: str, **counts: Any) -> Callable[[Activity], Activity]:
    return lambda activity: replace(activity, **{what: getattr(activity, what) | counts["of"]})


def told(trial: Trial) -> str:
    """What the check alone is told by, whatever else is broken."""
    check = judged("features", trial)
    return next(
        (cause_line(fact.cause) for fact in odd_traces(trial, {"features": check} if check.findings else {})), ""
    )


FUSED, AGAIN = Attention("forward", "attention"), Attention("backward", "attention")
BATCHED = Attention("forward", "batched matmul")
OUTSIDE, BACKWARD = Matmul("other", "float64"), Matmul("backward", "float64")


ATTENDED = "activation checkpointing: attention is recomputed {} times in backward (rank 1, step 2), expected {}"
REPEATED = (
    "activation checkpointing: {} matmuls in backward (rank 1, step 2) are recomputed, expected 6 (full is requested)"
)


@pytest.mark.parametrize(
    ("trial", "change", "text"),
    [
        (
            DDP_2,
            also("attention", of={FUSED: 2}),
            "attention is computed 2 times in forward (rank 1, step 2), expected once",
        ),
        (
            DDP_2,
            also("attention", of={FUSED: 0, BATCHED: 2}),
            "attention falls back to plain matmuls: 0 fused kernels in forward, requested 1, and 2 batched matmuls (rank 1, step 2)",
        ),
        (
            DDP_2,
            lambda activity: replace(activity, attention={BATCHED: 2}),
            "attention falls back to plain matmuls: 0 fused kernels in forward, requested 1, and 2 batched matmuls (rank 1, step 2)",
        ),
        (
            DDP_2,
            also("attention", of={FUSED: 2, AGAIN: 1}),
            "attention is computed 2 times in forward (rank 1, step 2), expected once",
        ),
        (DDP_2, also("attention", of={FUSED: 0}), ""),
        (DDP_2, also("attention", of={BATCHED: 2}), ""),
        (DDP_2, also("attention", of={AGAIN: 1}), ATTENDED.format(1, 0) + " (none is requested)"),
        (FULL, also("attention", of={AGAIN: 2}), ATTENDED.format(2, 1) + " (full is requested)"),
        (FULL, also("attention", of={AGAIN: 0}), ATTENDED.format(0, 1) + " (full is requested)"),
        (FULL, also("matmuls", of={BACKWARD: 16}), REPEATED.format(0) + ": all their results are kept"),
        (FULL, also("matmuls", of={BACKWARD: 19}), REPEATED.format(3)),
        (DDP_2, also("matmuls", of={BACKWARD: 22}), ""),
        (
            DDP_2,
            also("matmuls", of={OUTSIDE: 3}),
            "matmuls run outside training passes: 3 matmuls outside forward and backward (rank 1, step 2)",
        ),
        (
            DDP_2,
            lambda a: also("calls", of={Call("other", "layers.0"): 1})(also("matmuls", of={OUTSIDE: 7})(a)),
            "the model runs outside training passes: 7 matmuls, some in its blocks, outside forward and backward (rank 1, step 2)",
        ),
        (
            DDP_2,
            also("saved", of={SavedTensorsHook("forward", "mine.offload", "Hook"): 1}),
            "activations saved for backward go through mine.offload.Hook, not requested on rank 1",
        ),
        (DDP_2, also("saved", of={SavedTensorsHook("forward", "torch.utils.checkpoint", "Hook"): 1}), ""),
    ],
)
def test_what_a_rank_computes_from_a_step_on_is_told(
    trial: Trial, change: Callable[[Activity], Activity], text: str
) -> None:
    wrong = computing(trial, change, (1,), since=2)
    assert told(wrong) == text
    assert not seen_text(odd_traces, wrong, "traffic")


def test_all_hooks_of_a_rank_are_told() -> None:
    hooks = {SavedTensorsHook("forward", "mine.offload", owner): 1 for owner in ("Pack", "Hook", "Pin")}
    assert told(computing(DDP_2, also("saved", of=hooks), (0,))) == (
        "activations saved for backward go through mine.offload.Hook, mine.offload.Pack and 1 more, not requested on rank 0"
    )


def test_attention_that_is_computed_more_often_follows_from_a_loss_or_samples_that_are_wrong() -> None:
    twice = computing(DDP_2, also("attention", of={FUSED: 2}))
    assert (
        seen_text(odd_traces, twice, "features")
        == "attention is computed 2 times in forward (rank 0, step 1), expected once"
    )
    assert not seen_text(odd_traces, twice, "features", "loss") and not seen_text(
        odd_traces, twice, "features", "samples"
    )


def test_matmuls_of_one_part_that_are_recomputed_are_told_with_it() -> None:
    calls = {
        Call("forward", "layers.0"): 1,
        Call("forward", "layers.0.attention.wq"): 1,
        Call("backward", "layers.0.attention"): 1,
    }
    wrong = computing(FULL, lambda a: replace(a, calls=calls, matmuls=a.matmuls | {BACKWARD: 19}))
    assert told(wrong) == (
        "activation checkpointing: 3 matmuls, of attention alone, in backward (rank 0, step 1) are recomputed, expected 6 (full is requested)"
    )


def test_attention_that_is_no_fused_kernel_or_divided_over_cp_is_not_counted() -> None:
    for attention in ({}, {BATCHED: 8}):
        unfused = computing(accumulating(), lambda activity, of=attention: replace(activity, attention=of))
        assert not seen_text(odd_traces, unfused, "features")
    divided = computing(trial_of(tiny_case(ParallelDims(cp=2))), also("attention", of={FUSED: 8}))
    assert not seen_text(odd_traces, divided, "features")
    assert seen_text(odd_traces, computing(accumulating(), also("attention", of={FUSED: 3})), "features") == (
        "attention is computed 1.5 times in forward (rank 0, step 1), expected once"
    )
    three = trial_of(tiny_case("ddp_2", model=replace(TINY, n_layers=3)))
    assert not seen_text(odd_traces, computing(three, also("attention", of={FUSED: 3})), "features")


# ---- compilers


def test_blocks_that_are_compiled_again_are_told_with_their_steps() -> None:
    trial = trial_of(tiny_case("ddp_2", replace(ADAMW, steps=3), compile=True))
    assert told(with_step(trial, 1, 3, graphs=5)) == "blocks are recompiled in step 3 (graphs on rank 1: 3)"


@pytest.mark.parametrize(
    ("compiler", "text"),
    [
        ({"graphs": 2, "graph break: print": 1}, "compiled blocks break into pieces: graph break: print"),
        ({"graphs": 2, "gave up: too many shapes": 1}, "torch.compile gave up, blocks run eagerly: too many shapes"),
        ({}, "compile is requested, no block ran compiled on rank 1"),
    ],
)
def test_what_keeps_a_compiler_from_compiling_is_told(compiler: dict[str, int], text: str) -> None:
    assert told(with_rank(COMPILED, 1, compiler=compiler)) == text


def test_code_that_is_compiled_although_nobody_asked_is_told() -> None:
    assert told(with_rank(DDP_2, 1, compiler={"graphs": 2})) == "compiled code ran on rank 1, compile is not requested"
    both = with_rank(with_rank(DDP_2, 0, compiler={"graphs": 2}), 1, compiler={"graphs": 2})
    assert told(both) == "compiled code ran, compile is not requested"


# ---- types and buckets


def with_policies(trial: Trial, **policy: dict[str, str]) -> Trial:
    """By field of the wrapper, what each unit of FSDP2 has, in the plan's order."""
    for rank, evidence in trial.ranks.items():
        structure = {
            name: replace(wrapper, **{field: of.get(name.partition(",")[0], "float64") for field, of in policy.items()})
            for name, wrapper in evidence.structure.items()
        }
        trial = with_rank(trial, rank, structure=structure)
    return trial


def test_gradients_that_are_reduced_in_another_dtype_are_told_with_the_units_that_do() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    lower = with_every_rank(trial, lambda t, rank: with_collectives(t, rank, in_float32))
    told_of_all = "gradients are reduced in float32, requested float64"
    first, block, _ = (unit[0] for unit in trial.plan.units[0])
    assert told(lower) == told(with_policies(lower, reduces_in={})) == told_of_all
    one, two = {block: "float32"}, {first: "", block: "float32"}
    assert (
        told(with_policies(lower, reduces_in=one))
        == f"{told_of_all}: FSDP unit {units(lower)[1]} has float32 reduce_dtype, others float64"
    )
    assert told(with_policies(lower, reduces_in=two)).endswith(
        f"{', '.join(units(lower)[:2])} have float32 or no reduce_dtype, others float64"
    )


def units(trial: Trial) -> list[str]:
    return list(trial.ranks[0].structure)


def in_float32(call: Collective) -> list[Collective]:
    return [replace(call, dtype="float32") if (call.op, call.phase) == ("reduce_scatter", "backward") else call]


def test_gradients_that_are_reduced_at_once_are_told_beside_the_buckets_requested() -> None:
    assert told(trial_of(tiny_case("ddp_2", bucket_mb=0.002))) == ""
    text = "bucket_mb 0.0001 is requested, up to 1880 bytes are reduced at once"
    assert told(trial_of(tiny_case("ddp_2", bucket_mb=0.0001))) == text


# ---- what a pipeline does


def test_a_pipeline_that_follows_no_schedule_is_told_by_what_the_check_found_first_or_as_not_run() -> None:
    trial = replace(DDP_2, case=tiny_case(ParallelDims(pp=2), schedule="1F1B"))
    acting = with_step(with_step(trial, 0, 1, actions=("0F0", "0B0")), 1, 1, actions=("1F0", "1B0"))
    found = seen(other_actions, acting, "schedule")
    assert found is not None and found.checks == ("schedule",)
    assert cause_line(found.cause) == "the pipeline does not follow schedule 1F1B: here: expected this, observed that"
    assert found.cause.finding == here("schedule")[1]
    idle = with_step(acting, 1, 1, actions=())
    assert seen_text(other_actions, idle, "schedule") == "no pipeline ran on rank 1, schedule 1F1B is requested"
    assert seen_text(other_actions, trial, "schedule") == "no pipeline ran, schedule 1F1B is requested"
    assert not seen_text(other_actions, idle, "traffic")


# ---- another recipe's noise


def test_a_recipe_of_which_nobody_measured_noise_is_judged_by_that_of_the_one_requested() -> None:
    """With a golden's where the reference has none, and by its own where it has."""
    trial = with_noise(DDP_2)
    other = replace(trial, case=replace(trial.case, features=replace(trial.case.features, reduce_dtype="float32")))
    own, key = trial.case.noise_key, other.case.noise_key
    (noise,), measured = trial.golden.noise.values(), noise_of(trial.case, loss=1e-3)
    assert own != key and _noise(trial, other) == {own: noise, key: noise}
    assert _noise(replace(trial, reference=replace(trial.reference, noise={own: measured})), other)[key] is measured
    both = replace(trial, golden=replace(trial.golden, noise={own: noise, key: measured}))
    assert _noise(both, other) == {own: noise, key: measured}
    assert _noise(replace(trial, golden=None), other) == {}
    assert _noise(replace(both, case=DDP_2.case), other) == {own: noise, key: measured}
