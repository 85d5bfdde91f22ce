"""Kinds of ranks: 16,384 ranks hold slices of a few dozen sizes, so what follows from sizes is worked out once a kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from harness.plan.slices import numel, slice_of, tp_dim
from harness.spec.dims import ParallelDims
from harness.spec.measured import Unit
from harness.spec.traits import TrainerTraits

T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]


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
    some = {held.kinds[rank]: _one_of_each_shape(held[rank], cuts) for rank in held.firsts()}
    every = _one_of_each_shape({fqn: shape for shapes in some.values() for fqn, shape in shapes.items()}, cuts)

    @functools.cache
    def sizes(pp: int | None, tp: int, degree: int, index: int) -> tuple[int, ...]:
        chosen = every if pp is None else some[pp]
        places = (dims.tp, tp), (degree, index)
        return tuple(numel(slice_of(fqn, shape, *places, cuts.get(fqn, 0))) for fqn, shape in chosen.items())

    @functools.cache
    def kind(place: Place, degrees: tuple[int, ...]) -> Hashable:
        parts = (sizes(place.pp, place.tp, degree, place.shard % degree) for degree in (shards, *degrees))
        return (place.pp, sizes(None, place.tp, 1, 0), *parts)

    degrees = PerRank(units.kinds, lambda rank: tuple(sorted({unit.degree for unit in units[rank]})))
    return numbered({rank: (units.kinds[rank], kind(place, degrees[rank])) for rank, place in places.items()})


def numbered(kinds: Mapping[int, Hashable]) -> dict[int, int]:
    """Kinds by number, in the order of their first ranks."""
    numbers: dict[Hashable, int] = {}
    return {rank: numbers.setdefault(kind, len(numbers)) for rank, kind in kinds.items()}


def _one_of_each_shape(shapes: Shapes, cuts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Parameters of one shape that tp and FSDP cut along the same dims have equal slices."""
    kinds = {(shape, tp_dim(fqn), cuts.get(fqn, 0)): fqn for fqn, shape in shapes.items()}
    return {fqn: shapes[fqn] for fqn in kinds.values()}
