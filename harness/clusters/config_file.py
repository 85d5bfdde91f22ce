"""torchtitan's configuration file as a case: degrees, sizes, lengths and options of execution, by the names of all its
versions.

What cannot run without memory is left out and reported; so is an option of these sections that is not known here. Data,
optimizer, metrics and checkpoints are not looked at.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.clusters.draft import LLAMA_3
from harness.core.case.case import Case, CaseError
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.layout import TITAN_DEGREES, TITAN_SECTIONS, degrees_of_titan
from harness.core.case.traits import TrainerTraits
from harness.core.evidence.reading import read_text
from harness.reference.config import PRESETS, ModelConfig

READ = (
    *TITAN_DEGREES,
    *("seq_len", "batch_size", "local_batch_size", "global_batch_size", "max_norm"),
    *("pipeline_parallel_schedule", "pipeline_parallel_microbatch_size", "pipeline_parallel_microbatches"),
    *("fsdp_reshard_after_forward", "enable_cpu_offload", "dtype", "mixed_precision_param", "mixed_precision_reduce"),
)
OF_NUMBERS = ("steps", "warmup_steps", "dataset", "dataset_path", "seed", "deterministic", "gc_freq")


TITAN = TrainerTraits(fsdp_units="root", cp_heads="key_value")
"""What it chooses where a case leaves the choice to it, as of the end of 2024."""


@dataclass(frozen=True)
class FromFile:
    """set_aside: of what the file asks for, what is not run."""

    case: Case
    set_aside: tuple[str, ...]


def read(path: Path, world: int | None, flavor: str | None = None) -> FromFile:
    """world: how many ranks it is for; None where its degrees say it. flavor: in place of the file's. Raises CaseError."""
    try:
        told: dict[str, Any] = tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CaseError(f"{path}: {error}") from error
    model = _section(path, told, "model")
    if flavor is None:
        flavor = "debug" if model.get("flavor") == "debugmodel" else model.get("flavor")
        if model.get("name") != "llama3" or flavor not in PRESETS:
            which = f"model {model.get('name')} {flavor}: llama3 of a size {', '.join(PRESETS)} is known here"
            raise CaseError(f"{path}: {which}; add --model for another one")
    return case_of(str(path), told, PRESETS[flavor], world)


def _section(path: Path, told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(section := told.get(name, {}), dict):
        raise CaseError(f"{path}: {name}: expected a section")
    return section


def case_of(name: str, told: Mapping[str, Any], model: ModelConfig, world: int | None) -> FromFile:
    """name: of the configuration, whose options come by section. Raises CaseError."""
    said = {key: value for section in TITAN_SECTIONS for key, value in _section(Path(name), told, section).items()}
    dims = _dims(name, said, world)
    try:
        case = _case(name, said, dims, model, told.get("activation_checkpoint", {}))
    except ValueError as error:
        raise CaseError(f"{name}: {error}") from error
    return FromFile(case, tuple(_set_aside(told, said)))


def _dims(name: str, said: Mapping[str, Any], world: int | None) -> ParallelDims:
    degrees = degrees_of_titan(name, said, world)
    try:
        dims = ParallelDims(**degrees)
    except ValueError as error:
        raise CaseError(f"{name}: {error}") from error
    if dims.world_size != (world or dims.world_size):
        raise CaseError(f"{name}: {dims} = {dims.world_size} ranks, --world says {world}")
    return dims


def _case(
    name: str, said: Mapping[str, Any], dims: ParallelDims, model: ModelConfig, recompute: Mapping[str, Any]
) -> Case:
    stored, computed = said.get("dtype", "float32"), said.get("mixed_precision_param", "bfloat16")
    local = int(said.get("local_batch_size", said.get("batch_size", 8)))
    microbatches = _microbatches(said, dims, local)
    whole = int(said.get("global_batch_size", -1))
    samples = local * dims.dp if whole == -1 else whole
    if samples % (local * dims.dp) or local % microbatches:
        raise ValueError(f"{samples} samples are not {dims.dp} data ranks x {local} samples x a whole number")
    return Case(
        name=f"{model.name}_{dims.world_size}",
        why=f"torchtitan's {Path(name).name}, before a cluster is spent on it",
        dims=dims,
        model=model,
        training=replace(
            LLAMA_3,
            seq_len=int(said.get("seq_len", 2048)),
            global_batch=samples,
            steps=1,
            max_norm=said.get("max_norm", 1.0),
            dtype=stored,
            compute_dtype=None if computed == stored else computed,
        ),
        features=Features(
            schedule=said.get("pipeline_parallel_schedule", "1F1B") if dims.pp > 1 else "1F1B",
            microbatches=microbatches if dims.pp > 1 else None,
            accumulation=samples // (local * dims.dp),
            defer_sync=samples == local * dims.dp,
            activation_checkpointing=_recomputed(recompute),
            reshard_after_forward=said.get("fsdp_reshard_after_forward", "default"),
            cpu_offload=bool(said.get("enable_cpu_offload", False)),
            reduce_dtype=said.get("mixed_precision_reduce", "float32"),
        ),
    )


def _microbatches(said: Mapping[str, Any], dims: ParallelDims, local: int) -> int:
    if dims.pp == 1:
        return 1
    if "pipeline_parallel_microbatches" in said:
        return int(said["pipeline_parallel_microbatches"])
    return local // int(said.get("pipeline_parallel_microbatch_size", 1))


def _recomputed(said: Mapping[str, Any]) -> str:
    """Its default is selective, of every second block."""
    mode, which = said.get("mode", "selective"), str(said.get("selective_ac_option", "2"))
    if mode != "selective":
        return str(mode)
    kind = {"op": "op", "2": "layer"}.get(which)
    if kind is None:
        raise ValueError(f"activation_checkpoint.selective_ac_option {which!r}: op and '2' are known here")
    return kind


def _set_aside(told: Mapping[str, Any], said: Mapping[str, Any]) -> list[str]:
    compiled = said.get("compile") or told.get("compile", {}).get("enable")
    eight = told.get("float8", {}).get("enable_float8_linear") or told.get("model", {}).get("converters")
    found = ["torch.compile"] * bool(compiled) + ["8 bits"] * bool(eight)
    others = (key for key in said if key not in (*READ, *OF_NUMBERS, "compile"))
    unread = [key for key in others if said[key] is True or said[key] not in (False, 1, "", [])]
    return found + unread
