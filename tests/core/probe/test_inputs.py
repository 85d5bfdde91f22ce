"""Which tensor of a call the samples are: of ranks that are fed other samples, it differs."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from harness.core.probe.clock import Clock
from harness.core.probe.inputs import MOST_INPUTS, inputs_of, sample_begins
from harness.core.probe.samples import SampleRecorder

TOKENS, MASK, ROWS = torch.arange(4).reshape(1, 4), torch.ones(1, 4, dtype=torch.int64), torch.rand(1, 4)


@dataclass
class Batch:
    attention_mask: torch.Tensor
    samples: torch.Tensor


HOLDS_ITSELF: list[Any] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((TOKENS, MASK), {}),
        (({"input_ids": TOKENS, "labels": MASK},), {}),
        ((UserDict(attention_mask=MASK, input_ids=TOKENS),), {}),
        ((), {"attention_mask": MASK, "input_ids": TOKENS}),
        ((), {"labels": MASK, "input_ids": TOKENS}),
        ((), {"position_ids": MASK, "batch": [TOKENS, MASK]}),
        ((Batch(MASK, TOKENS),), {}),
        ((["a text", (None, [TOKENS])],), {}),
        (({"batch": MASK}, TOKENS), {}),
        ((HOLDS_ITSELF, TOKENS), {}),
    ],
)
def test_the_samples_are_the_first_tensor_that_is_no_mask_in_whatever_holds_it(args: Any, kwargs: Any) -> None:
    assert inputs_of(args, kwargs)[0] is TOKENS


def test_where_there_is_only_a_mask_it_is_told_and_where_there_is_no_tensor_nothing_is() -> None:
    assert [id(one) for one in inputs_of(({"mask": MASK, "positions": ROWS},), {})] == [id(MASK)]
    assert inputs_of((HOLDS_ITSELF, {1: "a text"}, [1] * 100_000), {"use_cache": False}) == []


@pytest.mark.parametrize(
    ("shape", "positions", "begins"),
    [
        ((5,), torch.tensor([0, 1, 2, 0, 1]), [0, 3]),
        ((1, 5), torch.tensor([[2, 3, 0, 1, 2]]), [2]),
        ((5,), torch.tensor([0, 1, 2, 0, 0]), [0, 3]),  # padding
        ((2, 5), torch.arange(5).expand(2, 5), None),
        ((5,), torch.arange(3), None),
        ((5,), None, None),
    ],
)
def test_samples_in_one_row_begin_where_positions_do(
    shape: tuple[int, ...], positions: torch.Tensor | None, begins: list[int] | None
) -> None:
    found = sample_begins(
        (torch.ones(shape, dtype=torch.int64),), {"more": {"positions": positions}}, torch.ones(shape)
    )
    assert begins == (None if found is None else found.nonzero().flatten().tolist())


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((TOKENS,), {}), ((), {"attention_mask": MASK, "input_ids": TOKENS}), (({"input_ids": TOKENS},), {})],
)
def test_the_probe_notes_the_tokens_that_a_model_is_called_with(args: Any, kwargs: Any) -> None:
    class Model(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None:
            return None

    clock, model = Clock(), Model()
    samples = SampleRecorder(clock)
    samples.attach([model])
    model(*args, **kwargs)
    samples.remove()
    assert [microbatch.tokens.tolist() for microbatch in samples.microbatches(1)] == [TOKENS.tolist()]


LABELS, NOISE, COUNT = torch.tensor([3]), torch.rand(1, 4), torch.tensor(7)


def test_labels_and_noise_are_inputs_too_and_counts_of_a_batch_are_not() -> None:
    for kwargs in ({"y": LABELS}, {"y": LABELS, "attention_mask": MASK, "num_items_in_batch": COUNT}):
        assert [id(one) for one in inputs_of((ROWS, NOISE), kwargs)] == [id(ROWS), id(NOISE), id(LABELS)]
    assert inputs_of((COUNT,), {}) == [COUNT]
    assert len(inputs_of(tuple(torch.rand(1) for _ in range(20)), {})) == MOST_INPUTS
