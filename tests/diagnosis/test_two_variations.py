"""A model that computes two things otherwise at once: each is found by the first module whose input it makes right."""

from __future__ import annotations

import pytest
from trained import MODEL, RECIPE, Ran, _ran, case_of, diagnosed, reference, with_inputs  # noqa: F401

from harness.diagnosis.forward import _both
from harness.reference.altered import Alter, Variation, altering
from harness.reference.variations import variations
from harness.report.cause_text import diagnosis_line

KNOWN = {one.observed: one for one in variations(MODEL, RECIPE)}
MODULES = {
    "inner": ["layers.0.attention.inner_attention"],
    "attention": ["layers.0.attention"],
    "feed_forward": ["layers.0.feed_forward"],
}


def altered(variation: Variation) -> Alter:
    return altering(variation, MODULES[variation.part], 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("keys are not rotated, queries are", "the feed-forward's activation is GELU"),
        ("attention scores are scaled by 1", "w1 and w3 are swapped"),
    ],
)
def test_two_that_the_model_computes_otherwise_are_both_named(ran: Ran, first: str, second: str) -> None:
    both = _both(altered(KNOWN[first]), altered(KNOWN[second]))
    found = diagnosed(with_inputs(ran(case_of(), altered=both), both))
    assert [first in diagnosis_line(found), second in diagnosis_line(found)] == [True, True]
    assert not {"not explained", "still failing"} & dict(found.evidence).keys()
