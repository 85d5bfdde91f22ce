"""The mesh axes and their degrees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ParallelDims:
    """The degree of every mesh axis, outermost first: pp, dp_replicate, dp_shard, cp, tp."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    over_cp: ClassVar[bool] = True
    """Whether parameters are sharded over cp as well."""

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"{axis} must be a whole number of at least 1, got {degree!r}")

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees)

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def shards(self) -> int:
        """Return over how many ranks a parameter is cut."""
        return self.dp_shard * (self.cp if self.over_cp else 1)

    @property
    def replicas(self) -> int:
        """Return on how many ranks each slice of a parameter lies, without counting those of tp and pp."""
        return self.dp_replicate * (1 if self.over_cp else self.cp)

    @property
    def dp(self) -> int:
        """Return the data-parallel degree: over how many ranks the samples of a step are divided."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        return " x ".join(f"{axis} {degree}" for axis, degree in zip(AXES, self.degrees, strict=True))


class CpReplicates(ParallelDims):
    """The same degrees where ranks of cp are replicas."""

    over_cp: ClassVar[bool] = False
