"""Which ranks of a layout are run. Each axis has a whole line where that is affordable, else its ends and what is uneven in it.
Added are the corners of the grid, and some drawn from a seed, so that over time all have been run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.core.case.case import Case
from harness.core.case.dims import AXES
from harness.core.plan.grid import rank_grid, shard_axis
from harness.core.plan.slices import chunk, tp_dim

LONGEST_LINE = 16  # ranks of an axis that are all run
DRAWN = 3


@dataclass(frozen=True)
class Chosen:
    """why: by reason, the ranks that it adds. seed: of those drawn."""

    why: Mapping[str, tuple[int, ...]]
    seed: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for ranks in self.why.values() for rank in ranks}))


def chosen(case: Case, seed: int = 0) -> Chosen:
    """All of a world that is small."""
    grid, known = rank_grid(case.dims), set[int]()
    why: dict[str, tuple[int, ...]] = {}

    def add(reason: str, places: Iterable[tuple[int, ...]]) -> None:
        new = sorted({int(grid[place]) for place in places} - known)
        known.update(new)
        why.update({reason: tuple(new)} if new else {})

    if case.dims.world_size <= LONGEST_LINE:
        return Chosen({"all": tuple(range(case.dims.world_size))}, seed)
    for axis in AXES:
        add(f"{axis} {_line(case, axis)}", _along(case, axis))
    add("corners", itertools.product(*({0, degree - 1} for degree in case.dims.degrees)))
    rest = sorted(set(range(case.dims.world_size)) - known)
    drawn = sorted(random.Random(seed).sample(rest, min(DRAWN, len(rest))))
    return Chosen(why | ({"drawn": tuple(drawn)} if drawn else {}), seed)


def _line(case: Case, axis: str) -> str:
    return "line" if getattr(case.dims, axis) <= LONGEST_LINE else "ends"


def _along(case: Case, axis: str) -> list[tuple[int, ...]]:
    """Return a long axis's first, second and last place, and those where its slices become smaller."""
    degree = getattr(case.dims, axis)
    places = range(degree) if degree <= LONGEST_LINE else sorted({0, 1, degree - 1, *_uneven(case, axis)})
    return [tuple(place if other == axis else 0 for other in AXES) for place in places]


def _uneven(case: Case, axis: str) -> set[int]:
    """Places along FSDP's axis that hold less of a parameter than the one before: a rest of it, or nothing."""
    if axis != shard_axis(case.dims):
        return set()
    degree, found = case.shards, set[int]()
    for fqn, shape in case.model.parameter_shapes().items():
        rows = shape[0] // (case.dims.tp if tp_dim(fqn) == 0 else 1)
        sizes = [stop - start for start, stop in (chunk((0, rows), degree, index) for index in range(degree))]
        found |= {index for index in range(1, degree) if sizes[index] < sizes[index - 1]}
    return found
