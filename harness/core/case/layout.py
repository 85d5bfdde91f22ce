"""Reading a layout as a person types it: dp_replicate=2,dp_shard=8; or from the configuration that a job is started
with."""

from __future__ import annotations

import importlib
import math
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from harness.core.case.case import CaseError
from harness.core.case.dims import AXES, ParallelDims
from harness.core.case.yaml_documents import document_of
from harness.core.evidence.near_names import did_you_mean
from harness.core.evidence.reading import read_text

TITAN_DEGREES = {
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
    "context_parallel_degree": "cp",
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
}
"""torchtitan's words for the degrees."""
TITAN_SECTIONS = ("training", "experimental", "parallelism")
"""Where its TOML files have them: in the first two until 2025."""
LAYOUT_FILES = "torchtitan's .toml, its MODULE:FUNCTION, or accelerate's .yaml"
"""What may be given in the place of degrees."""
REMAINING_AXIS = "dp_shard"  # what -1 may be written for
MANY_RANKS = 1 << 40  # ranks: any layout has room on them
ACCELERATE_DEGREES = {f"parallelism_config_{axis}_size": axis for axis in ("dp_replicate", "dp_shard", "cp", "tp")}
"""accelerate's, in the section parallelism_config of its configuration (1.10 on)."""
REPLICATED_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU")
"""What accelerate calls DDP, by the kind of machine."""
NOT_SHARDED = ("NO_SHARD", "3")
WITHIN_MACHINES = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "4", "5")
"""Of FSDP1's strategies, which accelerate takes by name or number."""


def parse_layout(text: str, world_size: int | None) -> ParallelDims:
    """Return the degrees of a layout as a person types it. Raises CaseError for a text or a file that does not give them.

    text: degrees, torchtitan's TOML file, MODULE:FUNCTION that returns its configuration, or accelerate's YAML file.
    world_size: number of ranks; None if unknown, or if the file says it.
    """
    degrees = _reader_of(text)(text, world_size)
    try:
        return ParallelDims(**degrees)
    except ValueError as error:
        raise CaseError(f"{text!r}: {error}") from error


def _reader_of(text: str) -> Callable[[str, int | None], dict[str, int]]:
    """Return the function that reads the degrees of this kind of text: by its ending, by MODULE:FUNCTION, else
    AXIS=DEGREE words."""
    if text.endswith(".toml"):
        return _degrees_of_toml
    if text.endswith((".yaml", ".yml")):
        return _degrees_of_accelerate
    return _degrees_of_python if ":" in text and "=" not in text else _degrees_of_words


def _degrees_of_words(text: str, _world_size: int | None) -> dict[str, int]:
    """Return the degrees of "dp_replicate=2,dp_shard=8", by axis.

    Raises CaseError for an unknown axis, or a degree in no digits.
    """
    degrees: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, degree = part.strip().partition("=")
        if axis not in AXES or not degree.isdigit():
            hint = "" if axis in AXES else did_you_mean(axis, AXES)
            raise CaseError(f"{part!r}: write AXIS=DEGREE, such as dp_shard=8; the axes are {', '.join(AXES)}{hint}")
        degrees[axis] = int(degree)
    return degrees


# ---- torchtitan


def _degrees_of_toml(file: str, world_size: int | None) -> dict[str, int]:
    """Return the degrees of torchtitan's TOML file, by axis. Raises CaseError if the file cannot be read or is no TOML."""
    text = _read_file(file)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise CaseError(f"{file}: {error}") from error
    words: dict[str, Any] = {}
    for name in TITAN_SECTIONS:
        words |= _section(file, document, name)
    return degrees_of_titan(file, words, world_size)


def _degrees_of_python(reference: str, world_size: int | None) -> dict[str, int]:
    """Return the degrees of the torchtitan configuration that MODULE:FUNCTION returns, by axis.

    The module is imported as a job started here would. Raises CaseError if that fails, or nothing with `parallelism`
    comes back.
    """
    module, _, name = reference.partition(":")
    if "" not in sys.path:
        sys.path.append("")
    try:
        parallelism = getattr(importlib.import_module(module), name)().parallelism
    except Exception as error:
        raise CaseError(f"{reference}: no configuration with `parallelism` was returned: {error!r}") from error
    return degrees_of_titan(
        reference,
        {word: getattr(parallelism, word) for word in TITAN_DEGREES if hasattr(parallelism, word)},
        world_size,
    )


def degrees_of_titan(source: str, words: Mapping[str, Any], world_size: int | None) -> dict[str, int]:
    """Return the degrees that torchtitan's words give, by axis. A shard degree of -1, or none, is what the others leave
    of the ranks.

    source: the file or function, with which a CaseError begins. Raises it for a degree that is no whole number.
    """
    degrees = {axis: _as_degree(source, word, words[word]) for word, axis in TITAN_DEGREES.items() if word in words}
    if degrees.get(REMAINING_AXIS, -1) == -1:
        others = math.prod(max(degree, 1) for axis, degree in degrees.items() if axis != REMAINING_AXIS)
        degrees[REMAINING_AXIS] = remaining_degree(source, "data_parallel_shard_degree -1", others, world_size)
    return degrees


def remaining_degree(source: str, word: str, others: int, world_size: int | None) -> int:
    """Return the degree that other degrees leave of the ranks. others: their product.

    Raises CaseError if it does not divide the world size, or the world size is None. MANY_RANKS need not be divisible.
    """
    if world_size is None:
        raise CaseError(f"{source}: {word}: the world size is not known; add --world N")
    if world_size % others and world_size != MANY_RANKS:
        raise CaseError(f"{source}: {others} ranks of the other degrees do not divide the world size {world_size}")
    return world_size // others


# ---- accelerate


def _degrees_of_accelerate(file: str, world_size: int | None) -> dict[str, int]:
    """Return the degrees of accelerate's configuration file, by axis: those of parallelism_config, else of its
    distributed_type.

    The world size is num_processes unless another one is given. Raises CaseError for a file that defines no layout.
    """
    document = accelerate_file(file)
    section = _section(file, document, "parallelism_config")
    if section.get("parallelism_config_sp_size", 1) != 1:
        raise CaseError(
            f"{file}: parallelism_config_sp_size: not an axis of a layout. Pass the degrees: --layout dp_shard=8"
        )
    degrees = {
        axis: _as_degree(file, word, section[word]) for word, axis in ACCELERATE_DEGREES.items() if word in section
    }
    return degrees or _degrees_of_kind(file, document, world_size or process_count(file, document))


def accelerate_file(file: str) -> dict[str, Any]:
    """Return the document of accelerate's configuration file.

    Raises CaseError if it cannot be read or lacks distributed_type.
    """
    text = _read_file(file)
    try:
        document = document_of(text)
    except (yaml.YAMLError, ValueError) as error:
        raise CaseError(f"{file}: not valid YAML: {error}") from error
    if not isinstance(document, dict) or "distributed_type" not in document:
        raise CaseError(f"{file}: not an accelerate configuration: distributed_type is missing")
    return document


def process_count(file: str, document: Mapping[str, Any]) -> int:
    """Return the number of ranks in accelerate's configuration. Raises CaseError if it has none."""
    number = document.get("num_processes")
    if number is None:
        raise CaseError(f"{file}: num_processes is missing; add --world N")
    return _as_degree(file, "num_processes", number)


def _degrees_of_kind(file: str, document: Mapping[str, Any], world_size: int) -> dict[str, int]:
    """Return the degrees of a configuration that names only a distributed_type: DDP's kinds, or FSDP with its sharding
    strategy.

    Raises CaseError for another type. Trap: YAML reads an unquoted NO as false.
    """
    kind = str(document["distributed_type"] or "NO")
    if kind in REPLICATED_TYPES:
        return {"dp_replicate": world_size}
    if kind != "FSDP":
        raise CaseError(
            f"{file}: distributed_type {kind} does not define a layout. Pass the degrees: --layout dp_shard=8"
        )
    fsdp = _section(file, document, "fsdp_config")
    strategy = str(fsdp.get("fsdp_sharding_strategy", fsdp.get("fsdp_reshard_after_forward", ""))).upper()
    if strategy in NOT_SHARDED:
        return {"dp_replicate": world_size}
    if strategy not in WITHIN_MACHINES:
        return {"dp_shard": world_size}
    machines = max(1, _as_degree(file, "num_machines", document.get("num_machines", 1)))
    return {"dp_replicate": machines, "dp_shard": remaining_degree(file, strategy, machines, world_size)}


def _section(file: str, document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section of a configuration; an empty one if it is absent. Raises CaseError if it is no mapping."""
    if not isinstance(section := document.get(name) or {}, dict):
        raise CaseError(f"{file}: {name}: expected a mapping")
    return section


def _read_file(file: str) -> str:
    """Return the text of a configuration file. Raises CaseError if it cannot be read."""
    try:
        return read_text(Path(file))
    except OSError as error:
        raise CaseError(f"{file}: {error.strerror}") from error


def _as_degree(source: str, word: str, value: object) -> int:
    """Return the value, which must be an int.

    Raises CaseError that names source and word for anything else, a bool included.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise CaseError(f"{source}: {word} must be a number of ranks, got {value!r}")
    return value
