"""The case's values, by the names of torchtitan's options that all its configurations have had."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from harness.core.case.case import Case


def training(case: Case) -> dict[str, Any]:
    """Return the case's values for options of the section `training`, by name."""
    recipe = case.training
    features = case.features
    param = recipe.compute_dtype or recipe.dtype
    return {
        "local_batch_size": case.local_batch * case.microbatches,
        "global_batch_size": recipe.global_batch,
        "seq_len": recipe.seq_len,
        "steps": recipe.steps,
        "max_norm": float("inf") if recipe.max_norm is None else recipe.max_norm,
        "dtype": recipe.dtype,
        "mixed_precision_param": param,
        "mixed_precision_reduce": features.reduce_dtype or param,
        "enable_cpu_offload": features.cpu_offload,
    }


def parallelism(case: Case) -> dict[str, Any]:
    """Return the case's values for options of the section `parallelism`, by name, but for the cut of a pipeline."""
    dims = case.dims
    features = case.features
    return {
        "data_parallel_replicate_degree": dims.dp_replicate,
        "data_parallel_shard_degree": dims.dp_shard,
        "tensor_parallel_degree": dims.tp,
        "context_parallel_degree": dims.cp,
        "context_parallel_load_balancer": "headtail" if features.cp_load_balance else None,
        "pipeline_parallel_degree": dims.pp,
        "pipeline_parallel_schedule": features.schedule,
        "pipeline_parallel_microbatch_size": case.local_batch,
        "fsdp_reshard_after_forward": features.reshard_after_forward,
    }


def checkpoint(case: Case) -> dict[str, Any]:
    """Return the options of the section `checkpoint`: torchtitan saves only when the adapter asks, and finds nothing to
    load.
    """
    return {
        "enable": bool(case.resume or case.last_step or case.features.export),
        "load_only": True,  # but for `save`
        "async_mode": "async" if case.features.async_save else "disabled",
        "folder": f"none_of_{os.getpid()}",
    }


def put_own(config: Any, own: Mapping[str, Any]) -> None:
    """Set options of one's own, given by `section.name`. None leaves an option as it is.

    Raises ValueError for one that does not exist.
    """
    for name, value in own.items():
        section, _, key = name.rpartition(".")
        holder = getattr(config, section, None) if section else config
        if not hasattr(holder, key):
            raise ValueError(f"this torchtitan has no option {name}")
        if value is not None:
            setattr(holder, key, value)


def under(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with "SECTION." before each name."""
    return {f"{section}.{name}": value for name, value in values.items()}
