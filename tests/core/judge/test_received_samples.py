"""What is asked about the samples of a step, on literal ones: of a run and of a recording alike."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.core.judge.received_samples import StepSamples, shared_samples, steps_of_samples

Microbatches = tuple[tuple[int | None, ...], ...]


def step_samples(*microbatches_of_ranks: Microbatches) -> StepSamples:
    """Return what ranks 0, 1, .. received of a step that requests each of the samples 1 to 4 once."""
    return StepSamples(Counter([1, 2, 3, 4]), dict(enumerate(microbatches_of_ranks)))


def test_samples_that_each_rank_received_its_part_of_are_right() -> None:
    samples = step_samples(((1,), (2,)), ((3, 4),))
    assert samples.by_rank == {0: [1, 2], 1: [3, 4]}
    assert samples.counts == samples.requested
    assert (samples.missing, samples.ranks_with_others, samples.ranks_alike) == (set(), [], [])


def test_a_row_that_is_no_sample_is_not_counted_and_its_rank_has_others() -> None:
    samples = step_samples(((1, None),), ((3, 4),), ((3, 9),))
    assert samples.counts == Counter({3: 2, 1: 1, 4: 1, 9: 1})
    assert (samples.missing, samples.ranks_with_others) == ({2}, [0, 2])


@pytest.mark.parametrize(
    ("second", "ranks_alike"),
    [
        (((1, 2),), [(0, 1)]),
        (((1,), (2,)), [(0, 1)]),  # in other microbatches
        (((2, 1),), []),  # in another order
        (((1, None),), []),
        ((), []),
    ],
)
def test_ranks_are_alike_that_received_the_same_samples_in_the_same_order(
    second: Microbatches, ranks_alike: list[tuple[int, ...]]
) -> None:
    assert step_samples(((1, 2),), second).ranks_alike == ranks_alike


def test_nothing_is_known_about_ranks_that_received_nothing_or_rows_that_are_no_samples() -> None:
    assert step_samples((), ()).ranks_alike == []
    assert step_samples(((None,),), ((None,),)).ranks_alike == []


def test_ranks_without_the_step_are_left_out() -> None:
    samples = step_samples(((1, 2),), ((3, 4),)).on_ranks((1, 7))
    assert samples.by_rank == {1: [3, 4]}
    assert samples.missing == {1, 2}


@pytest.mark.parametrize(
    ("microbatches", "pairs"),
    [
        (((1, 2), (3, 4)), []),
        (((1, 2), (2, 1)), [(1, 2)]),
        (((1,), (2,), (1,), (1,)), [(1, 3), (1, 4)]),
        (((1,), (2,), (1,), (2,)), [(1, 3), (2, 4)]),
        ((), []),
    ],
)
def test_a_microbatch_is_repeated_by_a_later_one_with_the_same_samples(
    microbatches: Microbatches, pairs: list[tuple[int, int]]
) -> None:
    assert step_samples(microbatches).repeated_microbatches(0) == pairs


@pytest.mark.parametrize(
    ("samples", "steps"), [([1], [1, 3]), ([1, 2], [1]), ([2, 3], []), ([None], []), ([1, None], []), ([], [])]
)
def test_steps_of_samples_have_requested_all_of_them(samples: list[int | None], steps: list[int]) -> None:
    assert steps_of_samples({1: [1, 2], 2: [3, 4], 3: [1, 5]}, samples) == steps


def test_samples_are_shared_that_are_in_several_sets() -> None:
    assert shared_samples([{1, 2}, {2, 3}, {3, 2}]) == {2, 3}
    assert shared_samples([{1}, {2}, set()]) == set()
