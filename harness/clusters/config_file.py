"""torchtitan's configuration file as a case: degrees, sizes, lengths and options of execution, by the names of all its
versions.

Options that cannot run without memory are left out and reported; so is an option of these sections that is not known
here. Data, optimizer, metrics and checkpoints are ignored.
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

READ_OPTIONS = (
    *TITAN_DEGREES,
    *("seq_len", "batch_size", "local_batch_size", "global_batch_size", "max_norm"),
    *("pipeline_parallel_schedule", "pipeline_parallel_microbatch_size", "pipeline_parallel_microbatches"),
    *("fsdp_reshard_after_forward", "enable_cpu_offload", "dtype", "mixed_precision_param", "mixed_precision_reduce"),
)
OPTIONS_OF_NUMBERS = ("steps", "warmup_steps", "dataset", "dataset_path", "seed", "deterministic", "gc_freq")


TITAN_TRAITS = TrainerTraits(fsdp_units="root", cp_heads="key_value")
"""What it chooses where a case leaves the choice to it, as of the end of 2024."""


@dataclass(frozen=True)
class CaseFromFile:
    """A configuration of torchtitan's, read as a case."""

    case: Case
    """The case."""
    set_aside: tuple[str, ...]
    """What the configuration asks for and is not run."""


def read_titan_file(path: Path, world: int | None, flavor: str | None = None) -> CaseFromFile:
    """Return the case of torchtitan's configuration file. Raises CaseError, also for another model than a known llama3.

    world: the number of ranks; None where the file's degrees define it. flavor: a key of PRESETS in place of the file's
    model.
    """
    try:
        sections: dict[str, Any] = tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CaseError(f"{path}: {error}") from error
    model = _section(path, sections, "model")
    if flavor is None:
        flavor = "debug" if model.get("flavor") == "debugmodel" else model.get("flavor")
        if model.get("name") != "llama3" or flavor not in PRESETS:
            reason = f"model {model.get('name')} {flavor}: llama3 of a size {', '.join(PRESETS)} is known here"
            raise CaseError(f"{path}: {reason}; add --model for another one")
    return case_of_titan_options(str(path), sections, PRESETS[flavor], world)


def _section(path: Path, sections: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of the file, empty if it is absent. CaseError if it is something else."""
    if not isinstance(section := sections.get(name, {}), dict):
        raise CaseError(f"{path}: {name}: expected a section")
    return section


def case_of_titan_options(
    name: str, sections: Mapping[str, Any], model: ModelConfig, world: int | None
) -> CaseFromFile:
    """Return the case of options by section, and the names of options that are not run.

    Raises CaseError. name: for messages.
    """
    options: dict[str, Any] = {}
    for section in TITAN_SECTIONS:
        options |= _section(Path(name), sections, section)
    dims = _dims(name, options, world)
    try:
        case = _case(name, options, dims, model, sections.get("activation_checkpoint", {}))
    except ValueError as error:
        raise CaseError(f"{name}: {error}") from error
    return CaseFromFile(case, tuple(_options_set_aside(sections, options)))


def _dims(name: str, options: Mapping[str, Any], world: int | None) -> ParallelDims:
    """Return the degrees of the layout. Raises CaseError for another number of ranks than `world`."""
    degrees = degrees_of_titan(name, options, world)
    try:
        dims = ParallelDims(**degrees)
    except ValueError as error:
        raise CaseError(f"{name}: {error}") from error
    if dims.world_size != (world or dims.world_size):
        raise CaseError(f"{name}: {dims} = {dims.world_size} ranks, --world says {world}")
    return dims


def _case(
    name: str, options: Mapping[str, Any], dims: ParallelDims, model: ModelConfig, recompute: Mapping[str, Any]
) -> Case:
    """Return the case of these options.

    ValueError where the batch does not divide. recompute: the section on recomputation.
    """
    stored = options.get("dtype", "float32")
    computed = options.get("mixed_precision_param", "bfloat16")
    local_batch = int(options.get("local_batch_size", options.get("batch_size", 8)))
    microbatches = _microbatches(options, dims, local_batch)
    global_batch = int(options.get("global_batch_size", -1))
    samples = local_batch * dims.dp if global_batch == -1 else global_batch
    if samples % (local_batch * dims.dp) or local_batch % microbatches:
        raise ValueError(f"{samples} samples are not {dims.dp} data ranks x {local_batch} samples x a whole number")
    return Case(
        name=f"{model.name}_{dims.world_size}",
        why=f"torchtitan's {Path(name).name}, before a cluster is spent on it",
        dims=dims,
        model=model,
        training=replace(
            LLAMA_3,
            seq_len=int(options.get("seq_len", 2048)),
            global_batch=samples,
            steps=1,
            max_norm=options.get("max_norm", 1.0),
            dtype=stored,
            compute_dtype=None if computed == stored else computed,
        ),
        features=Features(
            schedule=options.get("pipeline_parallel_schedule", "1F1B") if dims.pp > 1 else "1F1B",
            microbatches=microbatches if dims.pp > 1 else None,
            accumulation=samples // (local_batch * dims.dp),
            defer_sync=samples == local_batch * dims.dp,
            activation_checkpointing=_activation_checkpointing(recompute),
            reshard_after_forward=options.get("fsdp_reshard_after_forward", "default"),
            cpu_offload=bool(options.get("enable_cpu_offload", False)),
            reduce_dtype=options.get("mixed_precision_reduce", "float32"),
        ),
    )


def _microbatches(options: Mapping[str, Any], dims: ParallelDims, local: int) -> int:
    """Return the number of microbatches of a pipeline, 1 without one."""
    if dims.pp == 1:
        return 1
    if "pipeline_parallel_microbatches" in options:
        return int(options["pipeline_parallel_microbatches"])
    return local // int(options.get("pipeline_parallel_microbatch_size", 1))


def _activation_checkpointing(section: Mapping[str, Any]) -> str:
    """Return the feature activation_checkpointing for the file's section; "layer" by default, torchtitan's every second
    block.

    ValueError for a selective_ac_option that is unknown.
    """
    mode = section.get("mode", "selective")
    selection = str(section.get("selective_ac_option", "2"))
    if mode != "selective":
        return str(mode)
    kind = {"op": "op", "2": "layer"}.get(selection)
    if kind is None:
        raise ValueError(f"activation_checkpoint.selective_ac_option {selection!r}: op and '2' are known here")
    return kind


def _options_set_aside(sections: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Return the names of requested options that are not run: compilation, 8 bits, and unknown ones that are switched on."""
    compiled = options.get("compile") or sections.get("compile", {}).get("enable")
    in_8_bits = sections.get("float8", {}).get("enable_float8_linear") or sections.get("model", {}).get("converters")
    set_aside = []
    if compiled:
        set_aside.append("torch.compile")
    if in_8_bits:
        set_aside.append("8 bits")
    unknown_keys = (key for key in options if key not in (*READ_OPTIONS, *OPTIONS_OF_NUMBERS, "compile"))
    set_aside += [key for key in unknown_keys if options[key] is True or options[key] not in (False, 1, "", [])]
    return set_aside
