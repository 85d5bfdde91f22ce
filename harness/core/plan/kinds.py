"""Kinds of ranks: 16,384 ranks hold slices of a few dozen sizes, so what follows from sizes is worked out once a kind."""

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
        """make: of any rank of a kind what all of them have."""
        self.kinds, self._make = kinds, make
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

    def firsts(self) -> list[int]:
        """The first rank of each kind."""
        found: dict[Hashable, int] = {}
        for rank, kind in self.kinds.items():
            found.setdefault(kind, rank)
        return list(found.values())

    def of_each_kind(self) -> Iterator[T]:
        """What ranks have, once for each kind."""
        return (self[rank] for rank in self.firsts())


class Place(NamedTuple):
    """A rank's place among those that hold different slices. Replicas have the same place."""

    pp: int
    shard: int
    tp: int


def places_of_ranks(dims: ParallelDims) -> dict[int, Place]:
    """shard: over dp_shard and cp folded, as in `shard_place`."""
    pp, _, dp_shard, cp, tp = (index.tolist() for index in np.unravel_index(np.arange(dims.world_size), dims.degrees))
    folded = (outer * dims.cp + inner for outer, inner in zip(dp_shard, cp, strict=True)) if dims.over_cp else dp_shard
    return dict(enumerate(map(Place, pp, folded, tp)))


def kinds_of_ranks(
    dims: ParallelDims,
    places: Mapping[int, Place],
    held: PerRank[Shapes],
    units: PerRank[list[Unit]],
    traits: TrainerTraits,
) -> dict[int, int]:
    """Ranks are of a kind if they run the same stages, FSDP gathers the same units on them, and their slices have equal sizes.
    The slices are those of stored parameters, of parameters after forward, and of all parameters as tp leaves them.

    held: the shapes of the parameters of a rank's stages, by fqn; kinds are pp indices.
    """
    shards = dims.shards
    cuts = traits.measured.cut_dims
    chosen: list[dict[Cut, str]] = []
    alike = {held.kinds[rank]: _place_of(_one_of_each(held[rank], cuts), chosen) for rank in held.firsts()}
    whole = _place_of({cut: fqn for of in chosen for cut, fqn in of.items()}, chosen)

    @functools.cache
    def sizes(of: int, tp: int, degree: int, index: int) -> tuple[int, ...]:
        places = (dims.tp, tp), (degree, index)
        return tuple(numel(slice_of(fqn, shape, *places, cut_dim)) for (shape, _, cut_dim), fqn in chosen[of].items())

    @functools.cache
    def parts(of: int, tp: int, shard: int, degrees: tuple[int, ...]) -> Hashable:
        """Stages in the middle of a model have parameters of the same shapes."""
        return sizes(whole, tp, 1, 0), *(sizes(of, tp, degree, shard % degree) for degree in (shards, *degrees))

    def kind(place: Place, degrees: tuple[int, ...]) -> Hashable:
        return place.pp, parts(alike[place.pp], place.tp, place.shard, degrees)

    degrees = PerRank(units.kinds, lambda rank: tuple(sorted({unit.degree for unit in units[rank]})))
    return numbered({rank: (units.kinds[rank], kind(place, degrees[rank])) for rank, place in places.items()})


def numbered(kinds: Mapping[int, Hashable]) -> dict[int, int]:
    """Kinds by number, in the order of their first ranks."""
    numbers: dict[Hashable, int] = {}
    return {rank: numbers.setdefault(kind, len(numbers)) for rank, kind in kinds.items()}


def _place_of(one: dict[Cut, str], known: list[dict[Cut, str]]) -> int:
    """Return where this stands among the known ones, which it joins if it is new. Names of layers do not count."""
    same = (place for place, other in enumerate(known) if other.keys() == one.keys())
    if (place := next(same, None)) is None:
        known.append(one)
        return len(known) - 1
    return place


def _one_of_each(shapes: Shapes, cuts: Mapping[str, int]) -> dict[Cut, str]:
    """Return one name for each way of cutting a shape: parameters of one shape that tp and FSDP cut along the same dims have
    equal slices."""
    return {(shape, tp_dim(fqn), cuts.get(fqn, 0)): fqn for fqn, shape in shapes.items()}
