"""What the probe says was computed, of a model that it knows nothing of, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from harness.evidence import Activity
from harness.probe.activity import ActivityRecorder
from harness.probe.clock import Clock
from harness.probe.samples import SampleRecorder


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.dropout(self.up(x), 0.5))


@pytest.fixture
def recorder() -> Iterator[ActivityRecorder]:
    clock = Clock()
    samples, found = SampleRecorder(clock), ActivityRecorder(clock)
    found.install()
    found.samples = samples  # whose hooks tell the clock of forward passes
    yield found
    samples.remove()
    found.remove()


def seen(recorder: ActivityRecorder, model: nn.Module, passes: int = 1) -> Activity:
    recorder.attach([model])
    recorder.samples.attach([model])
    for _ in range(passes):
        model(torch.ones(2, 4)).sum().backward()
    return recorder.of_step(1)


def test_a_block_that_is_computed_again_is_called_inside_backward(recorder: ActivityRecorder) -> None:
    activity = seen(recorder, nn.Sequential(nn.Linear(4, 4, bias=False), checkpoint_wrapper(Block())))
    assert activity.calls == {
        **{"forward ": 1, "forward 0": 1, "forward 1": 1, "forward 1.up": 1, "forward 1.down": 1},
        **{"backward 1": 1, "backward 1.up": 1, "backward 1.down": 1},
    }
    # forward three; backward one for each weight and each input that needs a gradient, and `up` again
    assert activity.products == {"forward float32": 3, "backward float32": 5 + 1}
    assert activity.random == {"forward": 1, "backward": 1}


@pytest.mark.parametrize(("fed", "rows"), [(8, (2, 4)), (6, (1, 6))])
def test_samples_that_lie_end_to_end_in_one_row_are_cut_at_the_recipes_length(fed: int, rows: tuple[int, int]) -> None:
    samples = SampleRecorder(Clock(), row_length=lambda step: 4 * step)
    embedding = nn.Embedding(8, 2)
    samples.attach([embedding])
    embedding(torch.arange(fed))
    samples.remove()
    (part,) = samples.microbatches(1)
    assert part.tokens is not None and part.tokens.shape == rows


def test_a_recomputation_that_draws_other_random_numbers_is_noticed(recorder: ActivityRecorder) -> None:
    model = nn.Sequential(checkpoint_wrapper(Block(), preserve_rng_state=False), nn.Linear(4, 4))
    activity = seen(recorder, model, passes=2)
    assert activity.random["other state 0"] == 2


def test_one_that_restores_the_state_is_not(recorder: ActivityRecorder) -> None:
    activity = seen(recorder, nn.Sequential(checkpoint_wrapper(Block()), nn.Linear(4, 4)), passes=2)
    assert activity.random == {"forward": 2, "backward": 2}


def test_removed_it_sees_nothing_any_more(recorder: ActivityRecorder) -> None:
    model = nn.Sequential(Block())
    before = seen(recorder, model)
    recorder.remove()
    told = dict(before.calls), dict(before.products)
    model(torch.ones(2, 4)).sum().backward()
    assert (recorder.of_step(1).calls, recorder.of_step(1).products) == told
