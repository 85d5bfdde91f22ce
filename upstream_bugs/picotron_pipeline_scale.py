"""picotron's pipeline does not divide the loss by the number of microbatches: gradients are as many times too large.

Without a pipeline its train_step divides. The loss that is shown is divided in both, and AdamW's step hardly shows a factor;
SGD, clipping and AdamW's eps do. Expected: in each step the weights of the microbatches' mean losses sum to 1, with pp 1 as
with pp 2.

PYTHONPATH=CHECKOUT torchrun --nproc-per-node 2 upstream_bugs/picotron_pipeline_scale.py     exits with 1 if it is so
"""

from __future__ import annotations

import os
import sys
from typing import Any

import picotron_on_cpu as on_cpu
import torch
import torch.nn.functional as F

MICROBATCHES = 4
weights: list[float] = []
configured, cross_entropy = on_cpu.configuration, F.cross_entropy


def with_microbatches(degrees: dict[str, int]) -> dict[str, Any]:
    found = configured(degrees)
    found["training"]["gradient_accumulation_steps"] = MICROBATCHES
    return found


def seen(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Notes what backward begins with at this microbatch's mean loss: its weight in the step's gradient."""
    loss = cross_entropy(*args, **kwargs)
    loss.register_hook(lambda gradient: weights.append(float(gradient)))
    return loss


if __name__ == "__main__":
    on_cpu.configuration, F.cross_entropy = with_microbatches, seen
    on_cpu.train(pp=int(os.environ["WORLD_SIZE"]))
    if weights:
        total = sum(weights) / on_cpu.STEPS
        print(
            f"pp={os.environ['WORLD_SIZE']}: the microbatches' mean losses count {total:g} times; expected 1",
            flush=True,
        )
        sys.exit(int(abs(total - 1) > 1e-6))
