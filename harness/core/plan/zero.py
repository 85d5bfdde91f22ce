"""ZeRO's vectors: stage by stage it cuts optimizer state, gradients too, parameters too, each as equal parts of flat
vectors.

An interval of a vector falls into whatever parameters lie there: of one a rank has all, of the next a part, of most
nothing. With tensor parallel each tp rank has its own vector, of what it has of the parameters; all of them are laid
out alike.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.core.case.case import Case
from harness.core.case.features import ZERO
from harness.core.case.traits import FlatLayout, TrainerTraits
from harness.core.plan.slices import FlatUnit, local_numel, parameter_shapes
from harness.core.plan.stages import parameters_of_stage


def zero_units(case: Case, traits: TrainerTraits) -> tuple[FlatUnit, ...]:
    """Return the vectors that ZeRO cuts, laid out as the trainer's traits say (`zero_layout`).

    ZeRO-1 and 2 cut one vector of all parameters, of a pipeline one of each stage's; ZeRO-3 each parameter by itself.
    """
    layout = traits.zero_layout
    names = list(parameter_shapes(case.model))
    if case.wrapper == "zero3":
        return tuple(FlatUnit({fqn: (0,)}, numel_of_rank(case, fqn), layout.parts) for fqn in names)
    tensors = layout.order or tuple((fqn,) for fqn in names)
    ordered = tensors[::-1] if layout.reverse else tensors
    vectors = []
    for stage in range(case.n_stages):
        fqns = {*parameters_of_stage(case, stage)}
        vectors.append(_flat_unit_of(case, layout, [parts for parts in ordered if {*parts} <= fqns]))
    return tuple(vectors)


def _flat_unit_of(case: Case, layout: FlatLayout, tensors: Iterable[tuple[str, ...]]) -> FlatUnit:
    """Return the vector of these tensors, in this order. tensors: the fqns that each consists of, more than one if it is
    fused."""
    starts: dict[str, list[int]] = {}
    for parts in tensors:
        for fqn in parts:
            starts[fqn] = []
    end = 0
    for parts in tensors:
        end = _round_up(end, layout.starts)
        for fqn in parts:
            starts[fqn].append(end)
            end += numel_of_rank(case, fqn) // parts.count(fqn)
    return FlatUnit({fqn: tuple(begun) for fqn, begun in starts.items()}, end, layout.parts, layout.whole)


def zero_degree(case: Case) -> int:
    """Return the number of ranks over which ZeRO cuts: those of cp hold equal parameters."""
    return case.dims.dp_shard * case.dims.cp


def kept_parameter_dtype(case: Case) -> str:
    """Return the name of the dtype in which a rank keeps parameters.

    ZeRO's is the compute dtype, beside its optimizer's copy.
    """
    computed = case.training.compute_dtype if case.wrapper in ZERO else None
    return computed or case.training.dtype


def vectors_of_parameters(units: Iterable[FlatUnit], fqns: Iterable[str]) -> tuple[FlatUnit, ...]:
    """Return the vectors that contain any of the parameters. fqns: those of the parameters that a rank holds."""
    held_fqns = {*fqns}
    return tuple(unit for unit in units if held_fqns & unit.starts.keys())


def padded_elements(units: tuple[FlatUnit, ...], degree: int) -> int:
    """Return the number of elements of all vectors, each padded to `degree` equal parts."""
    return sum(unit.elements_per_rank(degree) * degree for unit in units)


def numel_of_rank(case: Case, fqn: str) -> int:
    """Return the elements that a rank has of a parameter before ZeRO cuts it."""
    return local_numel(fqn, parameter_shapes(case.model)[fqn], case.dims.tp)


def _round_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below a number."""
    return -(-number // multiple) * multiple
