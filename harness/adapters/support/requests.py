"""The requests of a case that a trainer is not known to fulfil."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from harness.core.case.case import Case
from harness.core.case.traits import OBSERVED

NOT_PASSED_ON = "has no such option, or this adapter does not pass it on"


def beyond(case: Case, known: Mapping[str, Any], who: str, *, saves: bool = False) -> Iterator[str]:
    """Yield a sentence for everything that a case requests and a trainer is not known to do. Nothing if it can do all.

    known: by key of the case's dims, features, training and model, the values allowed beside the usual one, or ... for
    any.
    who: the trainer's name. saves: whether it writes checkpoints and resumes from them.
    """
    for record in (case.dims, case.features, case.training, case.model):
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            values = known.get(field.name, ())
            if value not in (field.default, OBSERVED) and values is not ... and value not in values:
                yield f"{field.name} {value}: {who} {NOT_PASSED_ON}"
    if (case.resume or case.last_step) and not saves:
        yield f"resume: this adapter does not let {who} write checkpoints"
