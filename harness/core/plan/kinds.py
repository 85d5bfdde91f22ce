"""Kinds of ranks: 16,384 ranks hold slices of a few dozen sizes, so a value that follows from sizes is computed once a
kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from harness.core.case.dims import ParallelDims
from harness.core.case.measured import Unit
from harness.core.case.traits import TrainerTraits
from harness.core.plan.slices import numel, slice_of, tp_dim

T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]
Cut = tuple[tuple[int, ...], int | None, int]
"""Shape of a parameter, the dim that tp cuts and the one that FSDP cuts."""


class PerRank(Mapping[int, T]):
    """A value for each rank, made when first read, once for all ranks of a kind. They share it: it must not be changed."""

    def __init__(self, kinds: Mapping[int, Hashable], make: Callable[[int], T]) -> None:
        """kinds: the kind of each rank. make(rank) returns the value shared by all ranks of that rank's kind."""
        self.kinds = kinds
        self._make = make
        self._made: dict[Hashable, T] = {}

    def __getitem__(self, rank: int) -> T:
        kind = self.kinds[rank]
        if kind not in self._made:
            self._made[kind] = self._make(rank)
        return self._made[kind]

    def __iter__(self) -> Iterator[int]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    def __repr__(self) -> str:
        return repr(dict(self))

    def first_ranks(self) -> list[int]:
        """Return the first rank of each kind, in the order of ranks."""
        first_ranks: dict[Hashable, int] = {}
        for rank, kind in self.kinds.items():
            first_ranks.setdefault(kind, rank)
        return list(first_ranks.values())

    def values_by_kind(self) -> Iterator[T]:
        """Yield the value of each kind, once, in the order of their first ranks."""
        return (self[rank] for rank in self.first_ranks())


class ShardPlace(NamedTuple):
    """A rank's place among those that hold different slices. Replicas have the same place."""

    pp: int
    """Index along pp."""
    shard: int
    """Index of data-parallel sharding, over dp_shard and cp folded."""
    tp: int
    """Index along tp."""


def places_of_ranks(dims: ParallelDims) -> dict[int, ShardPlace]:
    """Return the place of each rank, by rank. Its shard is over dp_shard and cp folded, as in `shard_degree_and_index`."""
    indices = np.unravel_index(np.arange(dims.world_size), dims.degrees)
    pp, _, dp_shard, cp, tp = (index.tolist() for index in indices)
    shards = dp_shard
    if dims.over_cp:
        shards = [outer * dims.cp + inner for outer, inner in zip(dp_shard, cp, strict=True)]
    return dict(enumerate(map(ShardPlace, pp, shards, tp)))


def kinds_of_ranks(
    dims: ParallelDims,
    places: Mapping[int, ShardPlace],
    shapes: PerRank[Shapes],
    units: PerRank[list[Unit]],
    traits: TrainerTraits,
) -> dict[int, int]:
    """Return the kind of each rank as a number, counted from 0 in the order of first ranks.

    Ranks are of a kind if they run the same stages, FSDP gathers the same units on them, and their slices have equal
    sizes. The slices are those of stored parameters, of parameters after forward, and of all parameters as tp leaves
    them.

    shapes: the shapes of the parameters of a rank's stages, by fqn; kinds are pp indices.
    """
    shards = dims.shards
    cuts = traits.measured.cut_dims
    known_sets: list[dict[Cut, str]] = []
    set_of_pp = {}
    for rank in shapes.first_ranks():
        set_of_pp[shapes.kinds[rank]] = _set_number(_fqn_by_cut(shapes[rank], cuts), known_sets)
    all_cuts: dict[Cut, str] = {}
    for fqn_by_cut in known_sets:
        all_cuts |= fqn_by_cut
    full_set_number = _set_number(all_cuts, known_sets)

    @functools.cache
    def sizes(set_number: int, tp_index: int, degree: int, index: int) -> tuple[int, ...]:
        """Return the elements that a rank has of each parameter of a set."""
        numels = []
        for (shape, _, cut_dim), fqn in known_sets[set_number].items():
            numels.append(numel(slice_of(fqn, shape, (dims.tp, tp_index), (degree, index), cut_dim)))
        return tuple(numels)

    @functools.cache
    def parts(set_number: int, tp_index: int, shard: int, degrees: tuple[int, ...]) -> Hashable:
        """Return the sizes of a rank's slices, and of all parameters as tp leaves them.

        Stages in the middle of a model have parameters of the same shapes.
        """
        sizes_of_slices = (sizes(set_number, tp_index, degree, shard % degree) for degree in (shards, *degrees))
        return sizes(full_set_number, tp_index, 1, 0), *sizes_of_slices

    def kind(rank_place: ShardPlace, degrees: tuple[int, ...]) -> Hashable:
        set_number = set_of_pp[rank_place.pp]
        return rank_place.pp, parts(set_number, rank_place.tp, rank_place.shard, degrees)

    degrees = PerRank(units.kinds, lambda rank: tuple(sorted({unit.degree for unit in units[rank]})))
    kinds = {}
    for rank, rank_place in places.items():
        kinds[rank] = (units.kinds[rank], kind(rank_place, degrees[rank]))
    return rank_kind_numbers(kinds)


def rank_kind_numbers(kinds: Mapping[int, Hashable]) -> dict[int, int]:
    """Return the kind of each rank as a number, counted from 0 in the order in which `kinds` first has them."""
    numbers: dict[Hashable, int] = {}
    return {rank: numbers.setdefault(kind, len(numbers)) for rank, kind in kinds.items()}


def _set_number(fqn_by_cut: dict[Cut, str], known_sets: list[dict[Cut, str]]) -> int:
    """Return the index of a set of cuts among the known ones.

    A set that is new is appended to them. Names of layers do not count.
    """
    for index, known_set in enumerate(known_sets):
        if known_set.keys() == fqn_by_cut.keys():
            return index
    known_sets.append(fqn_by_cut)
    return len(known_sets) - 1


def _fqn_by_cut(shapes: Shapes, cuts: Mapping[str, int]) -> dict[Cut, str]:
    """Return one fqn for each way of cutting a shape, by (shape, tp's dim, FSDP's dim). cuts: FSDP's dim by fqn, 0 if
    absent.

    Parameters of one shape that tp and FSDP cut along the same dims have equal slices.
    """
    return {(shape, tp_dim(fqn), cuts.get(fqn, 0)): fqn for fqn, shape in shapes.items()}
