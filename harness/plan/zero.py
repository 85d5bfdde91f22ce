"""What ZeRO cuts, stage by stage: optimizer state, gradients too, parameters too, each as equal parts of flat vectors.

An interval of a vector falls into whatever parameters lie there: of one a rank has all, of the next a part, of most nothing.
"""

from __future__ import annotations

import itertools
import math

from harness.plan.slices import FlatUnit, parameter_shapes
from harness.spec.case import Case
from harness.spec.traits import TrainerTraits


def zero_units(case: Case, traits: TrainerTraits) -> tuple[FlatUnit, ...]:
    """ZeRO-1 and 2 cut one vector of all parameters, ZeRO-3 each parameter by itself."""
    layout, names = traits.zero_layout, list(parameter_shapes(case.model))
    if case.wrapper == "zero3":
        return tuple(FlatUnit({fqn: 0}, _numel(case, fqn), layout.parts) for fqn in names)
    ordered = names[::-1] if layout.reverse else names
    ends = itertools.accumulate(
        (_numel(case, fqn) for fqn in ordered), lambda end, size: _up(end, layout.starts) + size
    )
    end_of = dict(zip(ordered, ends, strict=True))
    starts = {fqn: end_of[fqn] - _numel(case, fqn) for fqn in names}
    return (FlatUnit(starts, max(end_of.values()), layout.parts),)


def padded_elements(units: tuple[FlatUnit, ...], degree: int) -> int:
    """Of all vectors, padded to equal parts."""
    return sum(unit.part(degree) * degree for unit in units)


def _numel(case: Case, fqn: str) -> int:
    return math.prod(parameter_shapes(case.model)[fqn])


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
