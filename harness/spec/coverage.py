"""What the matrix covers: every option a user can request, and every pair of options, with its case or its reason.

An option is a fragment of a case and how to recognise it in one. Two options of one kind are alternatives and no pair.
A pair is covered by a case that has both and that the trainer runs; else the two fragments together must be refused, by
validation or by the trainer, with a reason. What is neither is MISSING, and a test does not let that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from harness.reference.config import ModelConfig
from harness.spec.case import Case, CaseError
from harness.spec.loading import from_json

Unsupported = Callable[[Case], str | None]

MISSING = "MISSING: neither a case nor a reason"


@dataclass(frozen=True)
class Option:
    """kind: what it is an alternative of. fragment: the least that a case must say to request it."""

    name: str
    kind: str
    fragment: Mapping[str, Any]
    holds: Callable[[Case], bool]


@dataclass(frozen=True)
class Pair:
    """cases: those that have both options. reason: why there can be none."""

    one: Option
    other: Option
    cases: tuple[str, ...] = ()
    reason: str = ""

    @property
    def missing(self) -> bool:
        return self.reason == MISSING


def options() -> list[Option]:
    """In the order of the table in docs/coverage.md."""
    return [*_layouts(), *_of_features(), *_of_training(), *_of_model(), *_of_runs()]


def pairs(cases: Sequence[Case], unsupported: Unsupported) -> list[Pair]:
    """unsupported: why a trainer cannot run a case; None if it can."""
    every = options()
    run = [case for case in cases if not any(map(unsupported, case.launches.values()))]
    having = {option.name: {case.name for case in run if option.holds(case)} for option in every}
    order = [case.name for case in run]
    found = []
    for one, other in combinations(every, 2):
        if one.kind != other.kind:
            both = tuple(sorted(having[one.name] & having[other.name], key=order.index))
            found.append(Pair(one, other, both, "" if both else _reason(one, other, unsupported)))
    return found


def _reason(one: Option, other: Option, unsupported: Unsupported) -> str:
    """Why nobody can request both."""
    fragment = join(one.fragment, other.fragment)
    try:
        case = from_json({"name": "pair", "why": "-"} | fragment)
    except CaseError as error:
        return str(error).removeprefix(": case 'pair': ")
    if not (one.holds(case) and other.holds(case)):
        return f"one excludes the other: together they are {case.dims}"
    return unsupported(case) or MISSING


def join(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two fragments as one; where both say something, the other's."""
    joined = dict(one)
    for key, value in other.items():
        mine = joined.get(key)
        joined[key] = join(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return joined


# ---- the options


def _layouts() -> Iterator[Option]:
    shard, replicate = {"dp_shard": 2}, {"dp_replicate": 2}
    both = shard | replicate
    for name, dims, wrapper in (
        ("DDP", replicate, "ddp"),
        ("replicate", replicate, "replicate"),
        ("FSDP2", shard, "fsdp2"),
        ("HSDP", both, "fsdp2"),
        ("HSDP, dp_shard 1", replicate, "fsdp2"),
        ("FSDP1", shard, "fsdp1"),
        ("FSDP1, NO_SHARD", replicate, "fsdp1"),
        ("FSDP1, hybrid", both, "fsdp1"),
    ):
        yield Option(name, "data parallel", {"dims": dims, "features": {"wrapper": wrapper}}, _wrapped(dims, wrapper))
    yield Option("TP", "tp", {"dims": {"tp": 2}}, lambda case: case.dims.tp > 1 and case.features.sequence_parallel)
    yield _feature("TP without sequence parallel", "tp", "sequence_parallel", False, {"tp": 2})
    yield Option(
        "CP", "cp", {"dims": {"cp": 2}}, lambda case: case.dims.cp > 1 and case.features.cp_rotation == "allgather"
    )
    yield _feature("CP, all-to-all", "cp", "cp_rotation", "alltoall", {"cp": 2})
    for schedule in (
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ):
        fragment = {"dims": {"pp": 2}, "features": {"schedule": schedule}, "model": {"n_layers": 4}}
        yield Option(f"PP, {schedule}", "pp", fragment, _scheduled(schedule))


def _wrapped(dims: Mapping[str, int], wrapper: str) -> Callable[[Case], bool]:
    """CP shards like dp_shard: FSDP over its ranks is FSDP."""

    def holds(case: Case) -> bool:
        replicated, sharded = case.dims.dp_replicate > 1, case.dims.dp_shard * case.dims.cp > 1
        return (case.wrapper, replicated, sharded) == (wrapper, "dp_replicate" in dims, "dp_shard" in dims)

    return holds


def _scheduled(schedule: str) -> Callable[[Case], bool]:
    return lambda case: case.dims.pp > 1 and case.features.schedule == schedule


def _feature(name: str, kind: str, key: str, value: Any, dims: Mapping[str, int] | None = None) -> Option:
    fragment: dict[str, Any] = {"features": {key: value}} | ({"dims": dict(dims)} if dims else {})
    return Option(name, kind, fragment, lambda case: getattr(case.features, key) == value)


def _of_features() -> Iterator[Option]:
    yield _feature("no loss parallel", "loss parallel", "loss_parallel", False, {"tp": 2})
    yield _feature("async TP", "async TP", "async_tp", True, {"tp": 2})
    yield _feature("CP, no load balance", "load balance", "cp_load_balance", False, {"cp": 2})
    for policy in ("always", "never", 2):
        yield _feature(
            f"reshard {policy}", "reshard", "reshard_after_forward", policy, {"dp_shard": 4 if policy == 2 else 2}
        )
    yield _feature("CPU offload", "CPU offload", "cpu_offload", True, {"dp_shard": 2})
    for kind in ("full", "layer", "op"):
        yield _feature(f"AC, {kind}", "activation checkpointing", "activation_checkpointing", kind)
    twice = {"features": {"accumulation": 2}}
    yield Option("accumulation", "accumulation", twice, lambda case: case.features.accumulation > 1)
    yield _feature("torch.compile", "compile", "compile", True)


def _of_training() -> Iterator[Option]:
    small = {"global_batch": 8}  # as in cases/precision.yaml: noise is measured once a recipe, and takes long
    bf16 = {"dtype": "float32", "compute_dtype": "bfloat16"} | small
    yield Option(
        "float32",
        "precision",
        {"training": {"dtype": "float32"} | small},
        lambda case: (
            case.training.dtype == "float32" and not case.training.compute_dtype and not case.training.quantize
        ),
    )
    yield Option(
        "bfloat16, reduced in float32",
        "precision",
        {"dims": {"dp_shard": 2}, "training": bf16, "features": {"reduce_dtype": "float32"}},
        lambda case: case.training.compute_dtype == "bfloat16" and case.features.reduce_dtype == "float32",
    )
    yield Option(
        "bfloat16, reduced in bfloat16",
        "precision",
        {"dims": {"dp_shard": 2}, "training": bf16},
        lambda case: case.training.compute_dtype == "bfloat16" and case.features.reduce_dtype in (None, "bfloat16"),
    )
    for quantize, dtype in (
        ("float8_tensorwise", "float32"),
        ("float8_rowwise", "float64"),
        ("float8_rowwise_with_gw_hp", "float64"),
        ("mxfp8", "float32"),
    ):
        fragment: dict[str, Any] = {"training": {"dtype": dtype, "quantize": quantize} | small}
        fragment |= (
            {"model": {"dim": 128, "ffn_dim": 256}} if quantize == "mxfp8" else {}
        )  # blocks of 32, also under tp
        yield Option(quantize, "precision", fragment, _quantized(quantize))
    yield _training("SGD", "optimizer", "optimizer", "sgd")
    yield _training("no clipping", "clipping", "max_norm", None)
    yield _training("two optimizer groups", "optimizer groups", "decay", "matrices")
    yield _training("variable length", "length", "variable_length", True)
    yield _training("document mask", "document mask", "document_mask", True)
    yield _training("samples without a label", "labels", "masked_samples", True)


def _quantized(quantize: str) -> Callable[[Case], bool]:
    return lambda case: case.training.quantize == quantize


def _training(name: str, kind: str, key: str, value: Any) -> Option:
    return Option(name, kind, {"training": {key: value}}, lambda case: getattr(case.training, key) == value)


def _of_model() -> Iterator[Option]:
    yield Option(
        "tied embeddings", "tied", {"model": {"tied_embeddings": True}}, lambda case: case.model.tied_embeddings
    )
    yield Option(
        "RoPE scaling",
        "RoPE",
        {"model": {"rope_scaling": {"factor": 8.0, "original_max_position": 256}}},
        lambda case: case.model.rope_scaling is not None,
    )
    yield Option(
        "uneven sizes",
        "sizes",
        {"model": {"vocab_size": 259}},
        lambda case: case.model.vocab_size % 2 > 0,
    )
    yield Option(
        "dropout", "dropout", {"model": {"dropout": 0.1}}, lambda case: case.model.dropout > ModelConfig().dropout
    )


def _of_runs() -> Iterator[Option]:
    yield Option("run twice", "repeat", {"runs": 2}, lambda case: case.runs == 2)
    yield Option("resumed from a checkpoint", "checkpoint", {"resume": [{"after": 1}]}, lambda case: bool(case.resume))


# ---- what is shown


def pairs_text(found: Sequence[Pair]) -> str:
    """A line a pair: its first case, or the reason why there is none."""
    width = max(len(_title(pair)) for pair in found)
    lines = [f"{_title(pair):<{width}}  {_state(pair)}" for pair in found]
    covered = sum(bool(pair.cases) for pair in found)
    missing = sum(pair.missing for pair in found)
    refused = len(found) - covered - missing
    total = f"{len(found)} pairs of options: {covered} in a case, {refused} refused with a reason, {missing} missing"
    return "\n".join([*lines, "", total])


def _title(pair: Pair) -> str:
    return f"{pair.one.name} x {pair.other.name}"


def _state(pair: Pair) -> str:
    if not pair.cases:
        return pair.reason if pair.missing else f"refused: {pair.reason}"
    more = f" and {len(pair.cases) - 1} more" if len(pair.cases) > 1 else ""
    return pair.cases[0] + more
