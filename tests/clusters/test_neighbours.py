"""What a stage that runs alone is told by neighbours that are not there."""

from __future__ import annotations

import torch
from torch import nn

from harness.clusters.neighbours import hidden_state
from harness.clusters.request import Request


def test_a_stage_is_given_the_hidden_state_of_a_microbatch() -> None:
    case = Request(dims="pp=2,cp=2,dp_shard=2", model="8B", seq=64, microbatches=4, batch=16).build_case()
    given = hidden_state(case, nn.Linear(2, 2))
    assert (tuple(given.shape), given.dtype, given.requires_grad) == ((2, 32, 4096), torch.bfloat16, True)
