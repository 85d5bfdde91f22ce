"""Configurations of accelerate and DeepSpeed as drafts of a layout: degrees, precision, batch, what is cut and recomputed.

Neither says which model is trained. What is written as "auto" is of a trainer's own options, and is not said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.clusters import nemo
from harness.clusters.draft import HALVES, Draft
from harness.core.case.case import CaseError
from harness.core.case.dims import ParallelDims
from harness.core.case.layout import accelerate_file, layout, processes
from harness.core.case.traits import TrainerTraits
from harness.core.case.yaml_documents import document_of
from harness.core.evidence.reading import read_text

AUTO = "auto"
KEPT_WHOLE = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2", "FALSE", "2", "5")
"""Strategies of accelerate that keep parameters gathered after forward."""
BATCH, MICRO, TIMES = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
"""DeepSpeed's words for the samples of a step, of a microbatch, and how many of them a rank adds up."""


def of_yaml(file: str, world: int | None) -> Draft:
    """accelerate's, or NeMo's. Raises CaseError."""
    try:
        told = document_of(read_text(Path(file)))
    except (OSError, ValueError) as error:
        raise CaseError(f"{file}: {error}") from error
    except Exception as error:  # yaml's own
        raise CaseError(f"{file}: not valid YAML: {error}") from error
    return nemo.of_yaml(file, told, world) if nemo.is_one(told) else of_accelerate(file, world)


def of_accelerate(file: str, world: int | None) -> Draft:
    """Raises CaseError."""
    told = accelerate_file(file)
    world = world or processes(file, told)
    precision = _precision(str(told.get("mixed_precision") or "no").lower())
    kind = str(told["distributed_type"] or "NO")
    if kind == "DEEPSPEED":
        return _deepspeed_of_accelerate(file, told, world, precision)
    dims = layout(file, world)
    fsdp = told.get("fsdp_config") or {}
    if kind != "FSDP":
        return Draft(dims=dims, training=precision, features={"reduce_dtype": _reduced(precision, "float32")})
    strategy = str(fsdp.get("fsdp_sharding_strategy", fsdp.get("fsdp_reshard_after_forward", ""))).upper()
    features: dict[str, Any] = {"reduce_dtype": _reduced(precision, "bfloat16")}
    if dims.dp_shard * dims.cp > 1:
        features["wrapper"] = "fsdp2" if int(fsdp.get("fsdp_version", 1)) == 2 else "fsdp1"
        features |= {"reshard_after_forward": "never"} if strategy in KEPT_WHOLE else {}
        features |= {"cpu_offload": True} if fsdp.get("fsdp_offload_params") is True else {}
    if fsdp.get("fsdp_activation_checkpointing") is True:
        features["activation_checkpointing"] = "full"
    return Draft(dims=dims, training=precision, features=features)


def of_deepspeed(file: str, world: int | None) -> Draft:
    """Raises CaseError."""
    try:
        told = json.loads(read_text(Path(file)))
    except (OSError, ValueError, RecursionError) as error:
        raise CaseError(f"{file}: {error}") from error
    if not isinstance(told, dict) or not {"zero_optimization", BATCH, MICRO} & told.keys():
        raise CaseError(f"{file}: no configuration of DeepSpeed: it has neither zero_optimization nor {MICRO}")
    return _deepspeed(file, told, world)


def _deepspeed_of_accelerate(file: str, told: Mapping[str, Any], world: int, precision: Mapping[str, Any]) -> Draft:
    """A file of DeepSpeed's that it names takes precedence."""
    asked = told.get("deepspeed_config") or {}
    if named := asked.get("deepspeed_config_file"):
        return of_deepspeed(str(Path(file).parent / named), world)
    halves = {"bf16": {"enabled": precision["compute_dtype"] is not None}}
    steps = {TIMES: asked.get(TIMES, 1)}
    return _deepspeed(file, {"zero_optimization": {"stage": asked.get("zero_stage", 2)}, **halves, **steps}, world)


def _deepspeed(file: str, told: Mapping[str, Any], world: int | None) -> Draft:
    zero, tensor = _section(file, told, "zero_optimization"), _section(file, told, "tensor_parallel")
    tp = _number(file, tensor, "autotp_size") or 1
    stage, times = _number(file, zero, "stage") or 0, _number(file, told, TIMES) or 1
    if stage not in range(4):
        raise CaseError(f"{file}: zero_optimization.stage {stage}: 0 to 3 are known here")
    batch, local = _number(file, told, BATCH), _number(file, told, MICRO)
    data = _data_ranks(file, world, tp, batch, local, times)
    half = next((name for name in ("bf16", "fp16") if _section(file, told, name).get("enabled") is True), None)
    training = {"dtype": "float32", "compute_dtype": HALVES[half] if half else None}
    if (clipping := told.get("gradient_clipping")) not in (None, AUTO):
        training["max_norm"] = clipping or None
    features: dict[str, Any] = {"accumulation": times}
    if stage and data > 1:
        features["wrapper"] = f"zero{stage}"
    elif half:
        features["reduce_dtype"] = "bfloat16"
    aside = [f"{half} is planned as bfloat16"] * (half == "fp16")
    aside += [key for key in ("offload_param", "offload_optimizer") if zero.get(key)]
    axis = {"dp_shard": data} if stage and data > 1 else {"dp_replicate": data}
    return Draft(
        dims=ParallelDims(tp=tp, **axis),
        batch=batch,
        local=local or 1,
        training=training,
        features=features,
        traits=TrainerTraits(zero_reduces_by="all_reduce", master_weights=half is not None),
        set_aside=tuple(aside),
    )


def _data_ranks(file: str, world: int | None, tp: int, batch: int | None, local: int | None, times: int) -> int:
    """Return the data ranks of that world; without one, those that the three numbers of samples give."""
    if world is not None:
        if world % tp:
            raise CaseError(f"{file}: autotp_size {tp} does not divide the {world} of --world")
        if batch is not None and local is not None and batch != local * times * (world // tp):
            counted = f"{MICRO} {local} x {TIMES} {times} x {world // tp} data ranks"
            raise CaseError(f"{file}: {BATCH} {batch} is not {counted}")
        return world // tp
    if batch is None or local is None or batch % (local * times):
        words = f"{BATCH}, {MICRO} and {TIMES}"
        raise CaseError(f"{file}: of how many ranks it is does not follow from {words}: add --world N")
    return batch // (local * times)


def _precision(mixed: str) -> dict[str, Any]:
    return {"dtype": "float32", "compute_dtype": HALVES.get(mixed)}


def _reduced(precision: Mapping[str, Any], mixed: str) -> str | None:
    return mixed if precision["compute_dtype"] else None


def _section(file: str, told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(section := told.get(name) or {}, dict):
        raise CaseError(f"{file}: {name}: expected an object")
    return section


def _number(file: str, told: Mapping[str, Any], word: str) -> int | None:
    given = told.get(word)
    if given in (None, AUTO):
        return None
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise CaseError(f"{file}: {word} is {given!r}, and no number")
    return given
