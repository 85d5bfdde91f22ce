"""Every option that a user can request, and cases that are made of a list of them.

An option is a fragment of a case, and how to recognise it in one. A case that says `options: CPU offload; AC, full` is the
fragments of both together; what else it says wins. The table of docs/checks.md lists the names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.core.case.case import Case, CaseError
from harness.reference.config import ModelConfig


@dataclass(frozen=True)
class Option:
    """One option that a user can request.

    kind: what it is an alternative of. fragment: the least that a case must say to request it.
    """

    name: str
    kind: str
    fragment: Mapping[str, Any]
    is_requested_by: Callable[[Case], bool]


def all_options() -> list[Option]:
    """Return all options, in the order of the table in docs/checks.md."""
    return [*_layout_options(), *_feature_options(), *_training_options(), *_model_options(), *_run_options()]


def with_options(fragment: Mapping[str, Any], location: str) -> Mapping[str, Any]:
    """Return the fragment with what its `options` stand for; what else the fragment says wins. Unchanged without `options`.

    Raises CaseError for an unknown name. Names are separated by '; '.
    """
    if "options" not in fragment:
        return fragment
    known = {option.name: option for option in all_options()}
    names = str(fragment["options"]).split("; ")
    if unknown := [name for name in names if name not in known]:
        raise CaseError(
            f"{location}: options: unknown {unknown[0]!r}; separate options with '; '; known: {'; '.join(known)}"
        )
    own_fragment = {key: value for key, value in fragment.items() if key != "options"}
    return merge_fragments(
        functools.reduce(merge_fragments, (known[name].fragment for name in names), {}), own_fragment
    )


def merge_fragments(base: Mapping[str, Any], over: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return both fragments as a new one. `over` wins; mappings are merged key by key, and an empty value changes no
    mapping.

    A model named by its preset counts as {preset: name}.
    """
    merged = dict(base)
    for key, value in (over or {}).items():
        old = {"preset": merged[key]} if isinstance(merged.get(key), str) and key == "model" else merged.get(key)
        new = {"preset": value} if isinstance(value, str) and key == "model" else value
        new = {} if new is None and isinstance(old, Mapping) else new  # a key with nothing after it changes nothing
        merged[key] = merge_fragments(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else value
    return merged


# ---- the options


def _layout_options() -> Iterator[Option]:
    """Yield the options of layouts: the wrappers of data parallelism, TP, CP, and each pipeline schedule."""
    shard = {"dp_shard": 2}
    replicate = {"dp_replicate": 2}
    hybrid = shard | replicate
    for name, dims, wrapper in (
        ("DDP", replicate, "ddp"),
        ("replicate", replicate, "replicate"),
        ("FSDP2", shard, "fsdp2"),
        ("HSDP", hybrid, "fsdp2"),
        ("HSDP, dp_shard 1", replicate, "fsdp2"),
        ("FSDP1", shard, "fsdp1"),
        ("FSDP1, NO_SHARD", replicate, "fsdp1"),
        ("FSDP1, hybrid", hybrid, "fsdp1"),
    ):
        yield Option(
            name, "data parallel", {"dims": dims, "features": {"wrapper": wrapper}}, _wrapper_predicate(dims, wrapper)
        )
    yield Option("TP", "tp", {"dims": {"tp": 2}}, lambda case: case.dims.tp > 1 and case.features.sequence_parallel)
    yield _feature_option("TP without sequence parallel", "tp", "sequence_parallel", False, {"tp": 2})
    yield Option(
        "CP", "cp", {"dims": {"cp": 2}}, lambda case: case.dims.cp > 1 and case.features.cp_rotation == "allgather"
    )
    yield _feature_option("CP, all-to-all", "cp", "cp_rotation", "alltoall", {"cp": 2})
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
        yield Option(f"PP, {schedule}", "pp", fragment, _schedule_predicate(schedule))


def _wrapper_predicate(dims: Mapping[str, int], wrapper: str) -> Callable[[Case], bool]:
    """Return a predicate: whether a case has this wrapper, with replicas and shards above 1 exactly where `dims` names
    them.

    CP shards like dp_shard: FSDP over its ranks is FSDP.
    """

    def holds(case: Case) -> bool:
        replicated = case.dims.dp_replicate > 1
        sharded = case.dims.dp_shard * case.dims.cp > 1
        return (case.wrapper, replicated, sharded) == (wrapper, "dp_replicate" in dims, "dp_shard" in dims)

    return holds


def _schedule_predicate(schedule: str) -> Callable[[Case], bool]:
    return lambda case: case.dims.pp > 1 and case.features.schedule == schedule


def _feature_option(name: str, kind: str, key: str, value: Any, dims: Mapping[str, int] | None = None) -> Option:
    """Return an option that requests `features: {key: value}`, on these degrees if any are needed."""
    fragment: dict[str, Any] = {"features": {key: value}} | ({"dims": dict(dims)} if dims else {})
    return Option(name, kind, fragment, lambda case: getattr(case.features, key) == value)


def _feature_options() -> Iterator[Option]:
    """Yield the options of `features` that are no layouts: loss, resharding, offload, activation checkpointing, and so
    on."""
    yield _feature_option("no loss parallel", "loss parallel", "loss_parallel", False, {"tp": 2})
    yield _feature_option("async TP", "async TP", "async_tp", True, {"tp": 2})
    yield _feature_option("CP, no load balance", "load balance", "cp_load_balance", False, {"cp": 2})
    for policy in ("always", "never", 2):
        yield _feature_option(
            f"reshard {policy}", "reshard", "reshard_after_forward", policy, {"dp_shard": 4 if policy == 2 else 2}
        )
    yield _feature_option("CPU offload", "CPU offload", "cpu_offload", True, {"dp_shard": 2})
    for kind in ("full", "layer", "op"):
        yield _feature_option(f"AC, {kind}", "activation checkpointing", "activation_checkpointing", kind)
    twice = {"features": {"accumulation": 2}}
    yield Option("accumulation", "accumulation", twice, lambda case: case.features.accumulation > 1)
    yield _feature_option("torch.compile", "compile", "compile", True)


def _training_options() -> Iterator[Option]:
    """Yield the options of `training`: precision, optimizer, clipping and data."""
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
        yield Option(quantize, "precision", fragment, _quantize_predicate(quantize))
    yield _training_option("SGD", "optimizer", "optimizer", "sgd")
    yield _training_option("no clipping", "clipping", "max_norm", None)
    yield _training_option("two optimizer groups", "optimizer groups", "decay", "matrices")
    yield _training_option("variable length", "length", "variable_length", True)
    yield _training_option("document mask", "document mask", "document_mask", True)
    yield _training_option("samples without a label", "labels", "masked_samples", True)


def _quantize_predicate(quantize: str) -> Callable[[Case], bool]:
    return lambda case: case.training.quantize == quantize


def _training_option(name: str, kind: str, key: str, value: Any) -> Option:
    return Option(name, kind, {"training": {key: value}}, lambda case: getattr(case.training, key) == value)


def _model_options() -> Iterator[Option]:
    """Yield the options of `model`: tied embeddings, RoPE scaling, uneven sizes, dropout."""
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


def _run_options() -> Iterator[Option]:
    yield Option("run twice", "repeat", {"runs": 2}, lambda case: case.runs == 2)
    yield Option("resumed from a checkpoint", "checkpoint", {"resume": [{"after": 1}]}, lambda case: bool(case.resume))
