"""Configurations of accelerate and DeepSpeed as drafts of a layout: degrees, precision, batch, sharding and recomputation.

Neither defines which model is trained. A value "auto" comes from a trainer's own options, and counts as not given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.clusters import nemo
from harness.clusters.draft import PLANNED_DTYPES, Draft
from harness.core.case.case import CaseError
from harness.core.case.dims import ParallelDims
from harness.core.case.layout import accelerate_file, parse_layout, process_count
from harness.core.case.traits import TrainerTraits
from harness.core.case.yaml_documents import document_of
from harness.core.evidence.reading import read_text

AUTO = "auto"
STRATEGIES_WITHOUT_RESHARD = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2", "FALSE", "2", "5")
"""Strategies of accelerate that keep parameters gathered after forward."""
GLOBAL_BATCH = "train_batch_size"
"""DeepSpeed's word for the samples of a step."""
MICRO_BATCH = "train_micro_batch_size_per_gpu"
"""DeepSpeed's word for the samples of a microbatch."""
ACCUMULATION = "gradient_accumulation_steps"
"""DeepSpeed's word for how many microbatches a rank adds up."""


def draft_of_yaml(file: str, world: int | None) -> Draft:
    """Return the draft of a YAML file, NeMo's or else accelerate's. Raises CaseError.

    world: the number of ranks; None where the file defines it.
    """
    try:
        document = document_of(read_text(Path(file)))
    except (OSError, ValueError) as error:
        raise CaseError(f"{file}: {error}") from error
    except Exception as error:  # yaml's own
        raise CaseError(f"{file}: not valid YAML: {error}") from error
    return (
        nemo.draft_of_nemo_yaml(file, document, world)
        if nemo.is_nemo_document(document)
        else draft_of_accelerate(file, world)
    )


def draft_of_accelerate(file: str, world: int | None) -> Draft:
    """Return the draft of a configuration of accelerate's. Raises CaseError.

    world: the number of ranks; None or 0 means the file's number of processes. The model, lengths and batch are not in
    it.
    """
    document = accelerate_file(file)
    world = world or process_count(file, document)
    precision = _training_dtypes(str(document.get("mixed_precision") or "no").lower())
    kind = str(document["distributed_type"] or "NO")
    if kind == "DEEPSPEED":
        return _draft_of_accelerate_with_deepspeed(file, document, world, precision)
    dims = parse_layout(file, world)
    fsdp = document.get("fsdp_config") or {}
    if kind != "FSDP":
        return Draft(dims=dims, training=precision, features={"reduce_dtype": _reduce_dtype(precision, "float32")})
    strategy = str(fsdp.get("fsdp_sharding_strategy", fsdp.get("fsdp_reshard_after_forward", ""))).upper()
    features: dict[str, Any] = {"reduce_dtype": _reduce_dtype(precision, "bfloat16")}
    if dims.dp_shard * dims.cp > 1:
        features["wrapper"] = "fsdp2" if int(fsdp.get("fsdp_version", 1)) == 2 else "fsdp1"
        if strategy in STRATEGIES_WITHOUT_RESHARD:
            features["reshard_after_forward"] = "never"
        if fsdp.get("fsdp_offload_params") is True:
            features["cpu_offload"] = True
    if fsdp.get("fsdp_activation_checkpointing") is True:
        features["activation_checkpointing"] = "full"
    return Draft(dims=dims, training=precision, features=features)


def draft_of_deepspeed(file: str, world: int | None) -> Draft:
    """Return the draft of DeepSpeed's JSON file.

    Raises CaseError if it is none, or its numbers contradict each other or `world`.
    """
    try:
        document = json.loads(read_text(Path(file)))
    except (OSError, ValueError, RecursionError) as error:
        raise CaseError(f"{file}: {error}") from error
    if not isinstance(document, dict) or not {"zero_optimization", GLOBAL_BATCH, MICRO_BATCH} & document.keys():
        raise CaseError(f"{file}: not a DeepSpeed configuration: it has neither zero_optimization nor {MICRO_BATCH}")
    return _draft_of_document(file, document, world)


def _draft_of_accelerate_with_deepspeed(
    file: str, document: Mapping[str, Any], world: int, precision: Mapping[str, Any]
) -> Draft:
    """Return the draft of accelerate's file that requests DeepSpeed.

    A file of DeepSpeed's that it names takes precedence. Raises CaseError. precision: the dtypes by accelerate's mixed
    precision.
    """
    deepspeed_options = document.get("deepspeed_config") or {}
    if deepspeed_file := deepspeed_options.get("deepspeed_config_file"):
        return draft_of_deepspeed(str(Path(file).parent / deepspeed_file), world)
    halves = {"bf16": {"enabled": precision["compute_dtype"] is not None}}
    steps = {ACCUMULATION: deepspeed_options.get(ACCUMULATION, 1)}
    return _draft_of_document(
        file, {"zero_optimization": {"stage": deepspeed_options.get("zero_stage", 2)}, **halves, **steps}, world
    )


def _draft_of_document(file: str, document: Mapping[str, Any], world: int | None) -> Draft:
    """Return the draft of a DeepSpeed document: ZeRO stage, tp, batch, dtypes. Raises CaseError.

    Offloading is set aside, and fp16 is planned as bfloat16, which is noted.
    """
    zero = _section(file, document, "zero_optimization")
    tensor = _section(file, document, "tensor_parallel")
    tp = _number_of(file, tensor, "autotp_size") or 1
    stage = _number_of(file, zero, "stage") or 0
    accumulation = _number_of(file, document, ACCUMULATION) or 1
    if stage not in range(4):
        raise CaseError(f"{file}: zero_optimization.stage {stage}: 0 to 3 are known here")
    batch = _number_of(file, document, GLOBAL_BATCH)
    local = _number_of(file, document, MICRO_BATCH)
    data = _data_ranks(file, world, tp, batch, local, accumulation)
    half_dtype = next(
        (name for name in ("bf16", "fp16") if _section(file, document, name).get("enabled") is True), None
    )
    training = {"dtype": "float32", "compute_dtype": PLANNED_DTYPES[half_dtype] if half_dtype else None}
    if (clipping := document.get("gradient_clipping")) not in (None, AUTO):
        training["max_norm"] = clipping or None
    features: dict[str, Any] = {"accumulation": accumulation}
    if stage and data > 1:
        features["wrapper"] = f"zero{stage}"
    elif half_dtype:
        features["reduce_dtype"] = "bfloat16"
    set_aside = []
    if half_dtype == "fp16":
        set_aside.append("fp16 is planned as bfloat16")
    set_aside += [key for key in ("offload_param", "offload_optimizer") if zero.get(key)]
    axis = {"dp_shard": data} if stage and data > 1 else {"dp_replicate": data}
    return Draft(
        dims=ParallelDims(tp=tp, **axis),
        batch=batch,
        local_batch=local or 1,
        training=training,
        features=features,
        traits=TrainerTraits(zero_reduces_by="all_reduce", master_weights=half_dtype is not None),
        set_aside=tuple(set_aside),
    )


def _data_ranks(file: str, world: int | None, tp: int, batch: int | None, local: int | None, accumulation: int) -> int:
    """Return the number of data ranks: world / tp, or, if `world` is None, the one that the three numbers of samples give.

    Raises CaseError if they do not divide or contradict each other, or the samples are not given.
    """
    if world is not None:
        if world % tp:
            raise CaseError(f"{file}: autotp_size {tp} does not divide the {world} of --world")
        if batch is not None and local is not None and batch != local * accumulation * (world // tp):
            counted = f"{MICRO_BATCH} {local} x {ACCUMULATION} {accumulation} x {world // tp} data ranks"
            raise CaseError(f"{file}: {GLOBAL_BATCH} {batch} is not {counted}")
        return world // tp
    if batch is None or local is None or batch % (local * accumulation):
        words = f"{GLOBAL_BATCH}, {MICRO_BATCH} and {ACCUMULATION}"
        raise CaseError(f"{file}: cannot infer the world size from {words}; add --world N")
    return batch // (local * accumulation)


def _training_dtypes(mixed: str) -> dict[str, Any]:
    """Return the recipe's dtypes for accelerate's mixed precision; compute_dtype is None for "no" or an unknown one."""
    return {"dtype": "float32", "compute_dtype": PLANNED_DTYPES.get(mixed)}


def _reduce_dtype(precision: Mapping[str, Any], mixed: str) -> str | None:
    """Return the dtype in which gradients are reduced: `mixed` if computing is in another dtype, else None."""
    return mixed if precision["compute_dtype"] else None


def _section(file: str, document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object of the document, empty if it is absent. CaseError if it is something else."""
    if not isinstance(section := document.get(name) or {}, dict):
        raise CaseError(f"{file}: {name}: expected an object")
    return section


def _number_of(file: str, document: Mapping[str, Any], word: str) -> int | None:
    """Return the whole number under a key; None if it is absent or "auto". CaseError for anything else."""
    value = document.get(word)
    if value in (None, AUTO):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CaseError(f"{file}: {word} must be a number, got {value!r}")
    return value
