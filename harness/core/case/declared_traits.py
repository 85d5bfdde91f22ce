"""Traits that a case declares of its trainer, beside those of the adapter: `traits: {loss_chunks: 4}`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from harness.core.case.case import Case
from harness.core.case.traits import TrainerTraits
from harness.core.evidence.near_names import did_you_mean

DECLARED_ELSEWHERE = {
    "wrapper": "features: wrapper",
    "fsdp_units": "features: fsdp_units",
    "rates": "training: rates",
    "allow": "allow",
    "expected_failure": "expected_failure",
    "flat_order": "the adapter",
    "zero_layout": "the adapter",
    "measured": "nothing",
}
"""Traits that no case declares in `traits`, and what declares them."""
_KINDS: dict[str, tuple[type, ...]] = {"attention": (str, type(None)), "defers_sync": (bool, str)}
"""Types of the traits that may have another one than their default."""
TRAIT_NAMES = tuple(field.name for field in dataclasses.fields(TrainerTraits) if field.name not in DECLARED_ELSEWHERE)


def with_declared(case: Case, traits: TrainerTraits) -> TrainerTraits:
    """Return the adapter's traits with those of the case, which take precedence."""
    return dataclasses.replace(traits, **dict(case.traits))


def declaration(values: Iterable[tuple[str, Any]]) -> str:
    """Return the line that declares these traits in a case."""
    return f"traits: {{{', '.join(f'{name}: {json.dumps(value)}' for name, value in values)}}}"


def traits_for_case(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the traits as Case.traits keeps them: pairs of name and value, lists as tuples.

    Raises ValueError for an unknown trait, for one that is declared elsewhere, and for a value of a wrong type or
    choice.
    """
    pairs = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in values.items())
    for name, value in pairs:
        if name in DECLARED_ELSEWHERE:
            raise ValueError(f"{name} is declared by {DECLARED_ELSEWHERE[name]}, not here")
        if name not in TRAIT_NAMES:
            hint = did_you_mean(name, TRAIT_NAMES)
            raise ValueError(f"unknown trait {name!r}{hint}; known: {', '.join(TRAIT_NAMES)}")
        usual = getattr(TrainerTraits(), name)
        kinds = _KINDS.get(name, (type(usual),))
        if type(value) not in kinds:
            raise ValueError(f"{name}: expected {' or '.join(kind.__name__ for kind in kinds)}, got {value!r}")
    dataclasses.replace(TrainerTraits(), **dict(pairs))  # type: ignore[arg-type]
    return pairs
