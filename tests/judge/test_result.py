"""A finding's place: data for whoever looks closer, and the text that is made of it."""

from __future__ import annotations

from harness.judge.result import Finding


def test_the_text_of_a_place_is_made_of_rank_step_and_name() -> None:
    finding = Finding.at(1, "0", "4", step=2, name="matmuls outside training passes")
    assert finding == Finding("rank 1, step 2, matmuls outside training passes", "0", "4")
    assert (finding.rank, finding.step, finding.name) == (1, 2, "matmuls outside training passes")


def test_what_a_place_lacks_is_not_written() -> None:
    assert Finding.at(0, "a", "b").where == "rank 0"
    assert Finding.at(0, "a", "b", step=3).where == "rank 0, step 3"
    assert Finding.at(0, "a", "b", "1e-9", name="norm.weight") == Finding("rank 0, norm.weight", "a", "b", "1e-9")


def test_a_finding_of_several_ranks_names_none() -> None:
    finding = Finding("group [0,1], collective 3", "every rank: barrier", "rank 1: none")
    assert (finding.rank, finding.step, finding.name) == (None, None, "")
