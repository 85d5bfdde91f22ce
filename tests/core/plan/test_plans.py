"""Whole plans, number by number, of one small case for every option that changes one: tests/core/plan/plans.txt.

Real ranks move these bytes and hold these slices (the checks `traffic`, `reshard`, `memory` and `shard_contents` pass on cases
with each of these options); here is told what a change of the plan's arithmetic changes. EXPECTTEST_ACCEPT=1 rewrites it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from literal import EIGHT, UNEVEN, tiny_case

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.evidence.text import ranks_text
from harness.core.plan.make_plan import make_plan
from harness.core.plan.plan import Plan
from harness.core.plan.slices import slice_text
from harness.core.plan.stages import actions_of_rank, recomputed_layers, token_positions_of_rank
from harness.reference.config import ModelConfig

STORED = Path(__file__).with_name("plans.txt")
FOUR = ModelConfig(name="four", dim=8, n_layers=4, n_heads=2, n_kv_heads=2, vocab_size=8, ffn_dim=12)
FIVE = replace(FOUR, name="five", n_layers=5, vocab_size=7, ffn_dim=10)
MIXED = replace(EIGHT, dtype="float32", compute_dtype="bfloat16")
SHORT = replace(EIGHT, variable_length=True)


def quantized(recipe: str) -> Any:
    return replace(EIGHT, dtype="float32", quantize=recipe)


CASES: dict[str, tuple[Any, ...]] = {
    "one rank": ("single", EIGHT),
    "ddp": (ParallelDims(dp_replicate=3), EIGHT, {"accumulation": 2}),
    "ddp, reduced after every microbatch": ("ddp_2", EIGHT, {"accumulation": 2, "defer_sync": False}),
    "replicate": ("ddp_2", EIGHT, {"wrapper": "replicate"}),
    "fsdp": ("fsdp_2", MIXED, {"reduce_dtype": "float32", "accumulation": 2}),
    "fsdp over three, uneven": (ParallelDims(dp_shard=3), EIGHT, {"model": UNEVEN}),
    "fsdp, resharded always, reduced after every microbatch": (
        "fsdp_2",
        EIGHT,
        {"reshard_after_forward": "always", "accumulation": 2, "defer_sync": False},
    ),
    "fsdp, never resharded, tied": (
        "fsdp_2",
        EIGHT,
        {"reshard_after_forward": "never", "model": replace(FOUR, tied_embeddings=True)},
    ),
    "fsdp over four, resharded over two, uneven": (
        ParallelDims(dp_shard=4),
        MIXED,
        {"reshard_after_forward": 2, "model": FIVE},
    ),
    "fsdp, the root's units": (ParallelDims(dp_shard=4), MIXED, {"fsdp_units": "root", "model": FOUR}),
    "hsdp, the root's units, always": (
        "hsdp_2x2",
        EIGHT,
        {"fsdp_units": "root", "model": FOUR, "reshard_after_forward": "always"},
    ),
    "hsdp, the root's units, never": (
        "hsdp_2x2",
        EIGHT,
        {"fsdp_units": "root", "model": FOUR, "reshard_after_forward": "never"},
    ),
    "hsdp with cp": (ParallelDims(dp_replicate=2, dp_shard=2, cp=2), SHORT, {"cp_load_balance": False}),
    "fsdp1": (ParallelDims(dp_shard=3), EIGHT, {"wrapper": "fsdp1", "accumulation": 2, "model": UNEVEN}),
    "fsdp1 in float32, hybrid, kept, reduced after every microbatch": (
        "hsdp_2x2",
        replace(EIGHT, dtype="float32"),
        {"wrapper": "fsdp1", "reshard_after_forward": "never", "accumulation": 2, "defer_sync": False, "model": FIVE},
    ),
    "fsdp1, whole on every rank": ("ddp_2", EIGHT, {"wrapper": "fsdp1"}),
    "zero1 over three, uneven, accumulating": (
        ParallelDims(dp_shard=3),
        EIGHT,
        {"wrapper": "zero1", "accumulation": 2, "model": UNEVEN},
    ),
    "zero2 over three, uneven, accumulating": (
        ParallelDims(dp_shard=3),
        EIGHT,
        {"wrapper": "zero2", "accumulation": 2, "model": UNEVEN},
    ),
    "zero3 over three, uneven": (ParallelDims(dp_shard=3), EIGHT, {"wrapper": "zero3", "model": UNEVEN}),
    "tp, uneven": (ParallelDims(tp=3), SHORT, {"model": replace(UNEVEN, dim=12), "accumulation": 2}),
    "tp without sequence or loss parallel": (
        "fsdp_2_tp_2",
        MIXED,
        {"sequence_parallel": False, "loss_parallel": False, "model": UNEVEN},
    ),
    "tp, checkpointed": ("tp_2", EIGHT, {"activation_checkpointing": "full", "model": FOUR, "accumulation": 2}),
    "tp without sequence parallel, every second block checkpointed": (
        "tp_2",
        EIGHT,
        {"activation_checkpointing": "layer", "model": FIVE, "sequence_parallel": False},
    ),
    "tp, checkpointed by operator, dropout": (
        "tp_2",
        EIGHT,
        {"activation_checkpointing": "op", "model": replace(FOUR, dropout=0.5)},
    ),
    "cp": (ParallelDims(cp=2), EIGHT, {"activation_checkpointing": "full", "accumulation": 2}),
    "cp, passed on, in bfloat16": (ParallelDims(cp=4), MIXED, {"cp_rotation": "alltoall", "cp_load_balance": False}),
    "cp, passed on, checkpointed": (
        ParallelDims(cp=2, tp=2),
        SHORT,
        {"cp_rotation": "alltoall", "activation_checkpointing": "full", "model": FOUR},
    ),
    "cp, compiled": (ParallelDims(cp=2), EIGHT, {"compile": True}),
    "pp": (ParallelDims(pp=2), SHORT, {"model": FIVE, "accumulation": 2}),
    "pp with fsdp": (ParallelDims(pp=2, dp_shard=2), MIXED, {"model": FOUR, "accumulation": 2, "microbatches": 2}),
    "pp with fsdp, resharded always": (
        ParallelDims(pp=2, dp_shard=2),
        EIGHT,
        {"model": FOUR, "reshard_after_forward": "always", "schedule": "Interleaved1F1B", "reduce_dtype": "float32"},
    ),
    "pp with fsdp, never resharded": (
        ParallelDims(pp=2, dp_shard=2),
        EIGHT,
        {"model": FOUR, "reshard_after_forward": "never", "schedule": "GPipe"},
    ),
    "pp with hsdp and cp": (
        ParallelDims(pp=2, dp_replicate=2, cp=2),
        EIGHT,
        {"model": FOUR, "schedule": "ZBVZeroBubble", "activation_checkpointing": "full"},
    ),
    "pp with ddp and tp": (ParallelDims(pp=2, dp_replicate=2, tp=2), SHORT, {"model": FOUR, "loss_parallel": False}),
    "pp with tp without sequence parallel": (
        ParallelDims(pp=2, tp=2),
        EIGHT,
        {"model": FOUR, "sequence_parallel": False},
    ),
    "pp, the root's units": (ParallelDims(pp=2, dp_shard=2), EIGHT, {"model": FOUR, "fsdp_units": "root"}),
    "float8, one scale a tensor": ("tp_2", quantized("float8_tensorwise"), {"model": FOUR, "accumulation": 2}),
    "float8, one scale a row": (ParallelDims(cp=2, tp=2), quantized("float8_rowwise"), {"model": FOUR}),
    "float8, weight gradients in full": ("fsdp_2_tp_2", quantized("float8_rowwise_with_gw_hp"), {"model": FOUR}),
    "mxfp8": ("tp_2", quantized("mxfp8"), {"model": FOUR}),
}


def test_every_plan_is_as_it_was_accepted() -> None:
    told = "\n\n".join("\n".join(plan_of(name)) for name in CASES) + "\n"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        STORED.write_text(told)
    stored = STORED.read_text()
    changed = [line for line in difflib.unified_diff(stored.splitlines(), told.splitlines(), lineterm="", n=0)]
    assert told == stored, "\n".join(changed[:40])


def plan_of(name: str) -> Iterator[str]:
    dims, training, *rest = CASES[name]
    case = tiny_case(dims, training, **(rest[0] if rest else {}))
    assert case.local_batch > 0, f"{name}: no sample for each rank and microbatch"
    plan = make_plan(case)
    yield name
    yield f"  groups {'; '.join(f'{axis} ' + ' '.join(map(ranks_text, lines)) for axis, lines in plan.groups.items())}"
    outside = " ".join(map(str, sorted(set(plan.outside_bytes.values()))))
    yield f"  shards over {plan.shard_axis}, outside {outside}, integers {plan.integer_bytes}, quantized {len(plan.quantized)}"
    for unit in plan.flat:
        starts = (",".join(map(str, begun)) for begun in unit.starts.values())
        yield f"  flat {unit.numel}: {' '.join(starts)}"
    told: dict[tuple[str, ...], list[int]] = {}
    for rank in range(plan.dims.world_size):
        told.setdefault(tuple(_of_rank(case, plan, rank)), []).append(rank)
    for lines, ranks in told.items():
        yield f"  ranks {ranks_text(ranks)}"
        yield from (f"    {line}" for line in lines)


def _of_rank(case: Case, plan: Plan, rank: int) -> Iterator[str]:
    yield f"stages {plan.stages[rank]}, parameter bytes {plan.parameter_bytes[rank]}"
    if case.dims.cp > 1:
        yield f"positions {' '.join(map(str, token_positions_of_rank(case, rank, case.seq_len(1))))}"
    if recomputed := recomputed_layers(case, rank):
        yield f"recomputed {recomputed}"
    if actions := actions_of_rank(case, rank):
        yield f"actions {' '.join(map(str, actions))}"
    for step in (1, 2):
        for flow in plan.flows_of(rank, step) if step == 1 or plan.even_flows != plan.flows else ():
            marks = " optional" * flow.optional + " first" * flow.first
            yield f"step {step} {flow.axis} {flow.role}: {flow.op} in {flow.phase} {flow.bytes}{marks}"
    kept = plan.after_forward.get(rank, {})
    if kept:
        yield f"padding after forward {plan.padding_after_forward[rank]}"
    held: dict[str, list[str]] = {}
    for fqn, part in plan.slices[rank].items() if rank in (0, plan.dims.world_size - 1) else ():
        text = slice_text(part, plan.shapes[fqn], flat=bool(plan.flat))
        after = f", after forward {kept[fqn].bytes} over {kept[fqn].degree}" if fqn in kept else ""
        held.setdefault(text + after, []).append(fqn.removesuffix(".weight").replace("layers.", ""))
    yield from _named(held)
    if rank in plan.gradient_slices:
        yield f"gradient bytes {plan.gradient_bytes.get(rank, 'of parameters')}, state bytes {plan.state_bytes[rank]}"
        apart: dict[str, list[str]] = {}
        for fqn, part in plan.gradient_slices[rank].items():
            text = slice_text(part, plan.shapes[fqn], flat=True)
            apart.setdefault(f"gradient {text}", []).append(fqn.removesuffix(".weight").replace("layers.", ""))
        yield from _named(apart)


def _named(held: dict[str, list[str]]) -> Iterator[str]:
    for text, names in held.items():
        yield f"{text}: {' '.join(names) if len(names) < 12 else f'{len(names)} parameters'}"
