"""A layout as a person types it: dp_replicate=2,dp_shard=8."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from harness.spec.case import CaseError
from harness.spec.dims import AXES, ParallelDims

TITAN = {
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
    "context_parallel_degree": "cp",
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
}
"""torchtitan's words for the degrees, in the section [parallelism] of its configuration."""
REST = "dp_shard"  # what -1 may be written for


def layout(text: str, world_size: int) -> ParallelDims:
    """Degrees, or the TOML file of torchtitan that has them. Raises CaseError."""
    degrees = _of_toml(Path(text), world_size) if text.endswith(".toml") else _of_words(text)
    try:
        return ParallelDims(**degrees)
    except ValueError as error:
        raise CaseError(f"{text!r}: {error}") from error


def _of_words(text: str) -> dict[str, int]:
    degrees: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, degree = part.strip().partition("=")
        if axis not in AXES or not degree.isdigit():
            near = difflib.get_close_matches(axis, AXES, 1)
            meant = f"; did you mean {near[0]}?" if near and axis not in AXES else ""
            raise CaseError(f"{part!r}: write AXIS=DEGREE, such as dp_shard=8; the axes are {', '.join(AXES)}{meant}")
        degrees[axis] = int(degree)
    return degrees


def _of_toml(path: Path, world_size: int) -> dict[str, int]:
    """A shard degree of -1 is what the others leave of the ranks."""
    try:
        told: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8")).get("parallelism", {})
    except (OSError, ValueError) as error:
        raise CaseError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    degrees = {axis: _degree(path, word, told[word]) for word, axis in TITAN.items() if word in told}
    if degrees.get(REST, -1) == -1:
        others = [degree for axis, degree in degrees.items() if axis != REST]
        rest = world_size
        for degree in others:
            rest //= max(degree, 1)
        degrees[REST] = rest
    return degrees


def _degree(path: Path, word: str, given: object) -> int:
    if not isinstance(given, int) or isinstance(given, bool):
        raise CaseError(f"{path}: {word} is {given!r}, and no number of ranks")
    return given
