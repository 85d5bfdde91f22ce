"""The choice of the ranks of a layout that are run.

Each axis has a whole line where that is affordable, else its ends and the positions where slices shrink. Added are the
corners of the grid, and some drawn from a seed, so that over time all have been run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.core.case.case import Case
from harness.core.case.dims import AXES
from harness.core.plan.grid import rank_grid, shard_axis
from harness.core.plan.slices import chunk_interval, tp_dim

LONGEST_LINE = 16  # ranks of an axis that are all run
DRAWN_RANKS = 3


@dataclass(frozen=True)
class ChosenRanks:
    """Ranks of a layout that are run."""

    ranks_by_reason: Mapping[str, tuple[int, ...]]
    """Reason -> the ranks that it adds."""
    seed: int
    """Seed of the ranks that are drawn."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return all of these ranks, ascending."""
        return tuple(sorted(set(itertools.chain.from_iterable(self.ranks_by_reason.values()))))


def choose_ranks(case: Case, seed: int = 0) -> ChosenRanks:
    """Return the ranks of a case's layout that are run, by reason; all of a world of at most LONGEST_LINE ranks.

    seed: of the DRAWN_RANKS that are drawn from the rest.
    """
    grid = rank_grid(case.dims)
    chosen_ranks = set[int]()
    why: dict[str, tuple[int, ...]] = {}

    def add(reason: str, coordinates: Iterable[tuple[int, ...]]) -> None:
        """Add the ranks at these coordinates under the reason; those that were added before are left out."""
        added_ranks = sorted({int(grid[coordinate]) for coordinate in coordinates} - chosen_ranks)
        chosen_ranks.update(added_ranks)
        if added_ranks:
            why[reason] = tuple(added_ranks)

    if case.dims.world_size <= LONGEST_LINE:
        return ChosenRanks({"all": tuple(range(case.dims.world_size))}, seed)
    for axis in AXES:
        add(f"{axis} {_line_or_ends(case, axis)}", _coordinates_along(case, axis))
    add("corners", itertools.product(*({0, degree - 1} for degree in case.dims.degrees)))
    rest = sorted(set(range(case.dims.world_size)) - chosen_ranks)
    drawn = sorted(random.Random(seed).sample(rest, min(DRAWN_RANKS, len(rest))))
    return ChosenRanks(why | ({"drawn": tuple(drawn)} if drawn else {}), seed)


def _line_or_ends(case: Case, axis: str) -> str:
    """Return "line" if all positions of the axis are run, else "ends"."""
    return "line" if getattr(case.dims, axis) <= LONGEST_LINE else "ends"


def _coordinates_along(case: Case, axis: str) -> list[tuple[int, ...]]:
    """Return the coordinates of ranks that are run along an axis, with 0 on all other axes.

    All of a short axis; of a long one the first, second and last position, and those where its slices become smaller.
    """
    degree = getattr(case.dims, axis)
    positions = range(degree) if degree <= LONGEST_LINE else sorted({0, 1, degree - 1, *_uneven_positions(case, axis)})
    number = AXES.index(axis)
    zeros = (0,) * len(AXES)
    return [(*zeros[:number], position, *zeros[number + 1 :]) for position in positions]


def _uneven_positions(case: Case, axis: str) -> set[int]:
    """Return the positions along FSDP's axis whose slice of some parameter is smaller than the one before; empty for
    other axes."""
    if axis != shard_axis(case.dims):
        return set()
    degree = case.shards
    uneven_positions = set[int]()
    for fqn, shape in case.model.parameter_shapes().items():
        rows = shape[0] // (case.dims.tp if tp_dim(fqn) == 0 else 1)
        chunks = (chunk_interval((0, rows), degree, index) for index in range(degree))
        sizes = [stop - start for start, stop in chunks]
        uneven_positions |= {index for index in range(1, degree) if sizes[index] < sizes[index - 1]}
    return uneven_positions
