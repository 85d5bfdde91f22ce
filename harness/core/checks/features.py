"""Every requested feature left traces that it ran, and no feature that was not requested left any.

Recomputation is a block's forward call inside backward, and the matmuls that are done once more than a forward and a backward
pass need. A compiled block calls none of its modules from Python. Wrappers are known by their kind, precision by the dtype of
matmuls and of reduced gradients, dropout by random numbers drawn in forward. CPU offload is known by the wrapper's claim;
where the device is the CPU nothing else shows it. Buckets show in how much is reduced at once. Fused attention is done once a
layer and pass, in context parallel once for each part that a rank may look at. The only batched matmul beside it is that of a
table of angles. Matmuls outside of passes, beyond those allowed, are a second pass that was not requested. Hooks on tensors
saved for backward are recomputation's only. Blocks are compiled once for each length. The output layer is applied
once a pass, or as often as the trainer's traits say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from harness.core.case.case import Case
from harness.core.evidence.step import Attention, QuantizedMatmul, StepEvidence
from harness.core.judge import compiled_code, output_layer, policies, saved_hooks
from harness.core.judge.explained import ExplainedDifference, allowances_text, allowed_matmuls, explained_total
from harness.core.judge.finding import Finding, Limit, Value
from harness.core.judge.received_samples import expected_microbatch_sizes
from harness.core.judge.result import Result, verdict_of
from harness.core.judge.trial import Trial
from harness.core.plan.frozen import count_differentiated_layers, matmuls_left_out, matmuls_of_block
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.slices import BYTES
from harness.core.plan.stages import layers_of_stage, recomputed_layers

STAGE = "structure"
NEEDS = frozenset({"structure", "declared"})

Outcomes = Iterator[Finding | None]  # None: something was looked at, and was right


def check(trial: Trial) -> Result:
    """Judge on every rank whether each feature left traces that it ran, or none if it was not requested.

    Fused attention is judged only if the trainer has it. Examined is the number of comparisons.
    """
    outcomes: list[Finding | None] = []
    looks = (
        _recomputation_outcomes,
        output_layer.judge_output_calls,
        _compiled_block_outcomes,
        _matmul_outcomes,
        _quantized_matmul_outcomes,
    )
    looks += (
        *((_attention_outcomes,) if is_attention_fused(trial) else ()),
        _outside_matmul_outcomes,
        _hook_outcomes,
        _random_number_outcomes,
    )
    for rank, evidence in sorted(trial.ranks.items()):
        outcomes += [
            *wrapper_outcomes(trial, rank),
            *_offload_outcomes(trial, rank),
            *compiled_code.judge_compiled_code(trial, rank),
        ]
        for step in evidence.steps:
            trial_of_step = trial.with_case_at_step(step.step)
            outcomes += [outcome for look in looks for outcome in look(trial_of_step, rank, step)]
        outcomes += [*reduce_dtype_outcomes(trial, rank), *bucket_outcomes(trial, rank)]
    findings = [finding for finding in outcomes if finding]
    notes = (_text_of_allowances(trial), policies.unusual_switches_text(trial))
    return verdict_of("features", findings, len(outcomes), note="; ".join(filter(None, notes)))


def _finding_unless_equal(
    rank: int, quantity: str, expected: Value, observed: Value, *, module: str = "", **fields: Any
) -> Finding | None:
    """Return a finding about a feature, or about `module`, of this rank. None if both values are equal."""
    subject: dict[str, Any] = {
        "kind": "module" if module else "feature",
        "name": module,
        "quantity": quantity,
        **fields,
    }
    return None if expected == observed else Finding.at(rank, expected, observed, **subject)


# ---- wrappers and precision


def wrapper_outcomes(trial: Trial, rank: int) -> Outcomes:
    """Yield None if the rank's data-parallel wrappers are all of the requested kind, otherwise a finding.

    Over one data rank any single kind is right.
    """
    kinds = sorted({wrapper.kind for wrapper in trial.ranks[rank].structure.values()})
    alone = trial.case.wrapper is None and len(kinds) == 1 and trial.case.dims.dp * trial.case.dims.cp == 1
    wanted = kinds[0] if alone else trial.case.wrapper or "none"  # over one data rank any wrapper does
    yield _finding_unless_equal(rank, "data-parallel wrapper", wanted, " and ".join(kinds) or "none")


def _offload_outcomes(trial: Trial, rank: int) -> Outcomes:
    """Yield None if each wrapper of the rank claims CPU offload as requested, otherwise a finding.

    Right without wrappers.
    """
    observed = {wrapper.cpu_offload for wrapper in trial.ranks[rank].structure.values()}
    wanted = {trial.case.features.cpu_offload} if observed else observed
    yield _finding_unless_equal(rank, "CPU offload", _on_off_values(wanted), _on_off_values(observed))


def _on_off_values(switches: Collection[bool]) -> Value:
    """Return "off" and "on" for the different values among these switches, in this order."""
    return tuple("on" if switch else "off" for switch in sorted(switches))


def reduce_dtype_outcomes(trial: Trial, rank: int) -> Outcomes:
    """Yield None if the rank reduced gradients over its data ranks in the requested dtype, otherwise a finding.

    Nothing is yielded if it reduced none: the check `traffic` judges whether there are any. Reductions of keys and
    values over cp in the compute dtype do not count.
    """
    case, plan = trial.case, trial.plan
    groups = {plan.group_of(rank, axis) for axis in (plan.shard_axis, plan.replicate_axis) if axis in plan.groups}
    dtypes = {
        call.dtype
        for call in trial.ranks[rank].collectives
        if call.ranks in groups and call.phase == "backward" and call.op in ("reduce_scatter", "all_reduce")
    }
    computed = case.training.compute_dtype or case.training.dtype
    wanted = case.features.reduce_dtype or computed
    if trial.traits.cp_gathers and wanted in dtypes and plan.groups.get("cp") and plan.group_of(rank, "cp") in groups:
        dtypes -= {computed} - {wanted}  # of keys and values
    if floats := sorted(dtype for dtype in dtypes if "float" in dtype):
        note = policies.differing_units_text(trial.ranks[rank], wanted, "reduces_in")
        yield _finding_unless_equal(rank, REDUCED, wanted, " and ".join(floats), note=note)


def bucket_sizes(trial: Trial, rank: int) -> list[int]:
    """Return the bytes of each all_reduce over the replicas in backward of the rank's last step.

    Empty if there is none. In the last step DDP's buckets have their final order.
    """
    ranks, last = trial.plan.peers(rank, trial.plan.replicate_axis), trial.ranks[rank].steps[-1].step
    calls = [call for call in trial.ranks[rank].collectives if (call.ranks, call.op) == (ranks, "all_reduce")]
    return [call.bytes for call in calls if (call.phase, call.step) == ("backward", last)]


def bucket_outcomes(trial: Trial, rank: int) -> Outcomes:
    """Yield None if the largest bucket that the rank reduced is as large as requested, otherwise a finding.

    Nothing is yielded if no size is requested. A bucket is closed by the parameter that fills it, so it is smaller than
    its size and one parameter more.
    """
    if trial.case.features.bucket_mb is None:
        return
    size = int(trial.case.features.bucket_mb * 2**20)
    limit = size + max(math.prod(shape) for shape in trial.plan.shapes.values()) * BYTES[trial.case.training.dtype]
    largest, note = max(bucket_sizes(trial, rank), default=0), f"buckets of {size} bytes"
    finding = Finding.at(rank, Limit(1, limit - 1), largest, kind="feature", quantity=BUCKET, unit="bytes", note=note)
    yield None if 0 < largest < limit else finding


# ---- recomputation


def layers_of_rank(trial: Trial, rank: int) -> list[int]:
    """Return the indices of the layers of all pipeline stages that a rank runs."""
    return [layer for stage in trial.plan.stages[rank] for layer in layers_of_stage(trial.case, stage)]


def recomputation_counts(step: StepEvidence) -> dict[str, int]:
    """Return, by fqn, how often each module was called inside backward. Modules that were not called are left out."""
    return {call.fqn: count for call, count in step.activity.calls.items() if call.phase == "backward"}


def _recomputation_outcomes(trial: Trial, rank: int, step: StepEvidence) -> Outcomes:
    """Yield, for each layer and other module called in backward, None if the number of calls is right, or a finding.

    Compiled code recomputes without calling anything: its number is 0, and only matmuls show it. Where not a block but
    its forward is checkpointed (transformers), only the modules in it are called again, and the most frequent one
    counts.
    """
    recomputed = [] if trial.case.features.compile else recomputed_layers(trial.case, rank)
    calls, requested = recomputation_counts(step), {f"layers.{layer}" for layer in recomputed}
    for layer in layers_of_rank(trial, rank):
        wanted, block = trial.case.passes if layer in recomputed else 0, f"layers.{layer}"
        inside = (count for fqn, count in calls.items() if fqn.startswith(f"{block}."))
        called = calls.get(block, max(inside, default=0))
        yield _finding_unless_equal(rank, RECOMPUTATIONS, wanted, called, step=step.step, module=block)
    for fqn in calls.keys() - {output_layer.OUTPUT}:
        if not any(fqn == block or fqn.startswith(f"{block}.") for block in requested):
            yield _finding_unless_equal(rank, RECOMPUTATIONS, 0, calls[fqn], step=step.step, module=fqn or "the model")


def matmuls_by_dtype(step: StepEvidence, phase: str) -> Counter[str]:
    """Return the number of matmuls of a phase, by dtype."""
    counted = Counter[str]()
    for key, count in step.activity.matmuls.items():
        if key.phase == phase:
            counted[key.dtype] += count
    return counted


def recomputed_matmuls(trial: Trial, rank: int, step: StepEvidence) -> int | None:
    """Return how many matmuls backward of a step should repeat. None if blocks do not have equally many in forward.

    In every block recomputed it is all but the last, whose result is not needed, if the trainer stops there
    (`ac_early_stop`). "op" keeps every second one, the first and the last among them. How many a block has is read off
    the forward pass, because trainers fuse weights. Under dropout the last one is repeated too: backward needs the mask
    behind it. Where tp reduces attention's result and "op" keeps it, a compiler leaves out the matmul before, because
    nothing needs it.
    """
    case, layers = trial.case, len(layers_of_rank(trial, rank))
    inside = projects_in_forward(trial, rank, step)
    projected = inside * output_layer.forward_call_count(trial, rank)
    per_layer, remainder = divmod(matmuls_by_dtype(step, "forward").total() - projected, layers * case.passes)
    if remainder or per_layer < 1:
        return None
    skipped = 1 if trial.traits.ac_early_stop and not case.model.dropout else 0
    needless = int(case.features.compile and case.dims.tp > 1)
    again_per_layer = (
        per_layer // 2 - needless if case.features.activation_checkpointing == "op" else per_layer - skipped
    )
    return again_per_layer * case.passes * len(
        recomputed_layers(case, rank)
    ) + inside * output_layer.recomputation_count(trial, rank)


BUCKET, RECOMPUTATIONS = "largest bucket reduced", "recomputations"
REDUCED = "dtype of reduced gradients"
UNEVEN = "matmuls in forward"  # which are not those of alike blocks and of the output
LACKING = "matmuls in backward"  # fewer than what was multiplied in forward needs
RECOMPUTED, DTYPE = "matmuls in backward beyond planned gradients", "matmuls' dtype"


def _matmul_outcomes(trial: Trial, rank: int, step: StepEvidence) -> Outcomes:
    """Yield None or a finding on the dtype of a step's matmuls, then on the number of matmuls in backward.

    Needed are two for each gradient, and those that recomputation repeats. Nothing is yielded for quantized recipes,
    whose matmuls are judged by their own format. If blocks have unequal numbers in forward, a finding says so and
    backward is not judged.
    """
    if trial.case.training.quantize:
        return
    expect = partial(_finding_unless_equal, rank, step=step.step)
    forward, backward = matmuls_by_dtype(step, "forward"), matmuls_by_dtype(step, "backward")
    wanted = trial.case.training.compute_dtype or trial.case.training.dtype
    note = policies.matmul_dtypes_text(trial.ranks[rank], wanted, forward)
    yield expect(DTYPE, wanted, " and ".join(sorted(forward | backward)) or None, note=note)
    recomputed, outputs = recomputed_matmuls(trial, rank, step), output_layer.forward_call_count(trial, rank)
    if recomputed is None:
        wanted = f"equally many in every block, and {outputs} of the output"
        yield expect(UNEVEN, wanted, forward.total())
    else:
        layers = layers_of_rank(trial, rank)
        of_blocks = forward.total() - outputs * projects_in_forward(trial, rank, step)
        merged = has_merged_adapters(trial.case, of_blocks, layers)
        frozen = matmuls_left_out(trial.case, layers, outputs=outputs // trial.case.passes, merged=merged)
        beyond_gradients = backward.total() - 2 * forward.total() + frozen
        outside_passes = 0 if projects_in_forward(trial, rank, step) else plain_outside_matmuls(step)
        is_expected = beyond_gradients in {
            recomputed + times * outside_passes for times in (0, 2, 3)
        }  # the loss's: at once, later, or again
        if is_expected or beyond_gradients >= 0:
            called = sorted({fqn.split(".")[2] for fqn in recomputation_counts(step) if fqn.count(".") > 1})
            note = f"called in backward: {', '.join(called)}" * bool(called)
            yield expect(RECOMPUTED, recomputed, recomputed if is_expected else beyond_gradients, note=note)
        else:
            yield expect(LACKING, 2 * forward.total() + recomputed, backward.total())


# ---- attention

FUSED, ATTENDED, ATTENDED_AGAIN = Attention("forward", "attention"), "attention in forward", "attention recomputed"


def _attention_outcomes(trial: Trial, rank: int, step: StepEvidence) -> Outcomes:
    """Yield None or a finding on a step's attention kernels in each phase, and on batched matmuls.

    A layer that falls back to matmuls has too few kernels, and batched matmuls instead. Nothing is yielded if the rank
    received no samples, because torch then calls no kernel.
    """
    counts, case = step.activity.attention, trial.case
    if not any(expected_microbatch_sizes(trial, rank, step.step)):  # torch calls no kernel
        return
    parts, expect = (
        case.passes * attention_kernels_per_layer(trial, rank),
        partial(_finding_unless_equal, rank, step=step.step),
    )
    recomputed = 0 if case.features.activation_checkpointing == "op" else parts * len(recomputed_layers(case, rank))
    yield expect(ATTENDED, parts * len(layers_of_rank(trial, rank)), counts.get(FUSED, 0))
    yield expect(ATTENDED_AGAIN, recomputed, counts.get(Attention("backward", "attention"), 0))
    backward = parts * count_differentiated_layers(case, layers_of_rank(trial, rank))
    yield expect("attention's gradients", backward, counts.get(Attention("backward", "attention_backward"), 0))
    batched, most_batched = count_batched_in_training(trial, step), case.passes * len(trial.plan.stages[rank])
    yield None if batched <= most_batched else expect("batched matmuls", Limit(most=most_batched), batched)


def count_batched_matmuls(step: StepEvidence, phases: Collection[str] = ()) -> int:
    """Return the number of batched matmuls of a step in these phases, in all phases by default."""
    kinds = step.activity.attention.items()
    return sum(count for key, count in kinds if key.kind == "batched matmul" and key.phase in (phases or (key.phase,)))


def count_batched_in_training(trial: Trial, step: StepEvidence) -> int:
    """Return the number of batched matmuls of a step, without those outside of passes if these are allowed."""
    outside_passes = count_batched_matmuls(step, OUTSIDE_PHASES)
    return count_batched_matmuls(step) - (
        outside_passes if 0 < all_outside_matmuls(step) <= allowed_outside_matmuls(trial, step) else 0
    )


def is_attention_fused(trial: Trial) -> bool:
    """Return whether the trainer's attention is a fused kernel, as it declares or as was seen on any rank.

    A trainer has it in all layers and steps. A declaration counts only where there is such a kernel. Attention of
    another kind, or one kernel of a compiler's (flex attention), cannot be distinguished from other work.
    """
    if trial.traits.attention == "fused" and has_fused_kernel(trial):
        return True
    return any(step.activity.attention.get(FUSED) for _, step in trial.own_steps())


def has_fused_kernel(trial: Trial) -> bool:
    """Return whether torch has a fused kernel of attention for this recipe on the ranks' devices. Always true on CPUs.

    On GPUs none takes float64, or heads whose size 8 does not divide (sdp_utils.cpp of torch).
    """
    training, devices = (
        trial.case.training,
        {evidence.environment.get("device", "cpu") for evidence in trial.ranks.values()},
    )
    narrow = (training.compute_dtype or training.dtype) != "float64" and trial.case.model.head_dim % 8 == 0
    return narrow or devices == {"cpu"}


def attention_kernels_per_layer(trial: Trial, rank: int) -> int:
    """Return how many attention kernels a layer calls in one forward pass on this rank.

    Around a ring it is one for each rank whose keys a query may see, and all of them with balanced loads. It is 1 if cp
    gathers.
    """
    if trial.traits.cp_gathers or trial.case.features.cp_load_balance:
        return 1 if trial.traits.cp_gathers else trial.case.dims.cp
    return coordinate_of_rank(trial.case.dims, rank)["cp"] + 1


# ---- what is computed in addition

OUTSIDE_PHASES, OUTSIDE_MATMULS = ("pipeline", "optimizer", "other"), "matmuls outside training passes"


def unallowed_outside_matmuls(trial: Trial, rank: int, step: StepEvidence) -> int:
    """Return the number of matmuls outside of forward and backward, without batched ones; 0 if all are allowed.

    A loss that projects to the vocabulary itself has matmuls that forward lacks and no block calls: it is 0 then, too.
    """
    if 0 < all_outside_matmuls(step) <= allowed_outside_matmuls(trial, step):
        return 0
    return plain_outside_matmuls(step) if projects_in_forward(trial, rank, step) or outside_block_calls(step) else 0


def all_outside_matmuls(step: StepEvidence) -> int:
    """Return the number of matmuls of a step outside of training passes, batched ones among them."""
    return plain_outside_matmuls(step) + count_batched_matmuls(step, OUTSIDE_PHASES)


def allowed_outside_matmuls(trial: Trial, step: StepEvidence) -> int:
    """Return how many matmuls outside of passes are right: allowed ones, and Muon's in the optimizer."""
    forward, own = (
        matmuls_by_dtype(step, p).total() + count_batched_matmuls(step, (p,)) for p in ("forward", "optimizer")
    )
    explained = allowed_matmuls(trial, forward)
    if trial.case.training.optimizer == "muon":
        explained.append(ExplainedDifference("computed", own))
    return explained_total(explained)


def _text_of_allowances(trial: Trial) -> str:
    """Return a note of the allowances to compute, compile and hook, and which nothing uses. Empty without any."""
    hooks = {name for _, step in trial.own_steps() for name in saved_hooks.saved_tensor_hook_owners(step)}
    computed = any(all_outside_matmuls(step) for _, step in trial.own_steps())
    compiled = any(evidence.compiler.get("graphs") for evidence in trial.ranks.values())
    return allowances_text(
        trial,
        {
            "computed": lambda _: computed,
            "compiled": lambda _: compiled,
            "hooks": lambda allowance: allowance.name in hooks,
        },
    )


def plain_outside_matmuls(step: StepEvidence) -> int:
    """Return the number of matmuls of a step outside of training passes, without batched ones."""
    return sum(matmuls_by_dtype(step, phase).total() for phase in OUTSIDE_PHASES)


def outside_block_calls(step: StepEvidence) -> int:
    """Return the number of calls of blocks, and of modules in them, outside of forward and backward."""
    calls = step.activity.calls.items()
    return sum(count for call, count in calls if call.phase in OUTSIDE_PHASES and call.fqn.startswith("layers."))


def projects_in_forward(trial: Trial, rank: int, step: StepEvidence) -> bool:
    """Return whether forward has the matmuls of the output projection.

    False only if forward's number fits equal blocks without the output, and not with it, and some matmuls are outside
    of passes.
    """
    in_forward, blocks = matmuls_by_dtype(step, "forward").total(), trial.case.passes * len(layers_of_rank(trial, rank))
    lacks_them = (in_forward - output_layer.forward_call_count(trial, rank)) % blocks and in_forward % blocks == 0
    return not (lacks_them and plain_outside_matmuls(step))


def _outside_matmul_outcomes(trial: Trial, rank: int, step: StepEvidence) -> Outcomes:
    """Yield None if a step has no more matmuls outside of training passes than are allowed, otherwise a finding."""
    outside_passes, limit = unallowed_outside_matmuls(trial, rank, step), allowed_outside_matmuls(trial, step)
    wanted = Limit(most=limit) if limit and outside_passes else 0
    yield _finding_unless_equal(rank, OUTSIDE_MATMULS, wanted, outside_passes, step=step.step)


# ---- tensors saved for backward


def _hook_outcomes(trial: Trial, rank: int, step: StepEvidence) -> Outcomes:
    """Yield None if a step has no hooks on saved tensors but allowed ones and recomputation's, otherwise a finding."""
    yield _finding_unless_equal(
        rank, saved_hooks.SAVED_TENSOR_HOOKS, (), tuple(saved_hooks.foreign_hook_owners(trial, step)), step=step.step
    )


# ---- 8 bits

QUANTIZED_MATMULS = {
    "float8_tensorwise": ("float8_tensorwise", 2),
    "float8_rowwise": ("float8_rowwise", 2),
    "float8_rowwise_with_gw_hp": ("float8_rowwise", 1),  # the weight's gradient is multiplied in high precision
    "mxfp8": ("mxfp8", 2),
}
"""By recipe: the format of matmuls, and how many of a module's two in backward have it."""


def _quantized_matmul_outcomes(trial: Trial, rank: int, step: StepEvidence) -> Outcomes:
    """Yield, for each module and phase, None if it has the recipe's number of 8-bit matmuls, otherwise a finding.

    Exactly the recipe's modules have one in forward of each pass, and in backward one for each gradient. Nothing is
    yielded for compiled code, in which they are not seen.
    """
    counts = step.activity.quantized
    if trial.case.features.compile:  # compiled code does not tell
        return
    wanted = _planned_quantized_matmuls(trial, rank, counts)
    for key in sorted(wanted | counts):
        fields: dict[str, Any] = {"step": step.step, "module": key.fqn, "phase": key.phase}
        yield _finding_unless_equal(rank, f"{key.format} matmuls", wanted.get(key, 0), counts.get(key, 0), **fields)


def _planned_quantized_matmuls(
    trial: Trial, rank: int, counts: dict[QuantizedMatmul, int]
) -> dict[QuantizedMatmul, int]:
    """Return the 8-bit matmuls that a rank's modules should have in a step, by phase, module and format.

    Recomputation may repeat the forward matmul, which it does not where the rest is not needed: both numbers are right.
    counts: those that were observed.
    """
    case, layers, recomputed = trial.case, layers_of_rank(trial, rank), recomputed_layers(trial.case, rank)
    wanted: dict[QuantizedMatmul, int] = {}
    for fqn in trial.plan.quantized:
        format, backward = QUANTIZED_MATMULS[case.training.quantize or ""]
        in_block = fqn.startswith("layers.")
        layer = int(fqn.split(".")[1]) if in_block else case.model.n_layers - 1  # the output's stage has the last one
        if layer in layers:
            in_backward = QuantizedMatmul("backward", fqn, format)
            repeated = in_block and layer in recomputed and counts.get(in_backward) == (backward + 1) * case.passes
            wanted[QuantizedMatmul("forward", fqn, format)] = case.passes
            wanted[in_backward] = (backward + repeated) * case.passes
    return wanted


# ---- modules called


def _compiled_block_outcomes(trial: Trial, rank: int, step: StepEvidence) -> Outcomes:
    """Yield, for each layer, None if each of its modules was called once a pass in forward, otherwise a finding.

    A compiled block calls none of its modules.
    """
    wanted = 0 if trial.case.features.compile else trial.case.passes
    for layer in layers_of_rank(trial, rank):
        calls = ((call, call_count) for call, call_count in step.activity.calls.items() if call.phase == "forward")
        inside = {count for call, count in calls if call.fqn.startswith(f"layers.{layer}.")}
        called = tuple(sorted(inside)) if len(inside) > 1 else max(inside, default=0)
        yield _finding_unless_equal(
            rank, "calls of each module", wanted, called, step=step.step, module=f"layers.{layer}"
        )


# ---- dropout


def _random_number_outcomes(trial: Trial, rank: int, step: StepEvidence) -> Outcomes:
    """Yield None if forward of a step drew random numbers exactly if the model has dropout, otherwise a finding.

    Steps in which a hypothesis assumes that none are drawn should have none.
    """
    wanted = "drawn" if trial.case.model.dropout and step.step not in trial.assumption.undrawn else "none"
    observed = "drawn" if step.activity.random.get("forward", 0) else "none"
    yield _finding_unless_equal(rank, "random numbers in forward", wanted, observed, step=step.step)


# ---- adapters whose halves are multiplied and added to their matrix first


def has_merged_adapters(case: Case, of_blocks: int, layers: Sequence[int]) -> bool:
    """Return whether blocks have exactly the matmuls that they have if LoRA's adapters are added to their matrix first.

    False without LoRA. of_blocks: the number in a step's forward passes. layers: those of the rank.
    """
    return case.model.lora is not None and of_blocks == case.passes * len(layers) * matmuls_of_block(
        case.model, merged=True
    )
