"""picotron with cp_size 2 and dp_size 1 never reduces gradients over the cp ranks, so their weights diverge.

What reduces them, over cp and dp together, is put around the model where dp_size is above 1 only. Expected: in every step both
ranks hold the gradient that one device has, the mean of what they find. Found: each rank keeps the gradient of its part of the
sequence.

PYTHONPATH=CHECKOUT torchrun --nproc-per-node 2 upstream_bugs/picotron_cp_without_dp.py     exits with 1 if it is so
"""

from __future__ import annotations

import sys
from typing import Any

import picotron_on_cpu as on_cpu
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

wrong: list[bool] = []


def apart(tensors: list[torch.Tensor]) -> float:
    """The largest difference between the two ranks' elements."""
    mine = torch.cat([each.detach().flatten() for each in tensors])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    return float((both[0] - both[1]).abs().max())


def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    gradients, weights = apart([each.grad for each in parameters]), apart(parameters)
    wrong.append(gradients > 1e-6)
    if dist.get_rank() == 0:
        print(
            f"step {len(wrong)}: the cp ranks' gradients differ by {gradients:.2e}, weights by {weights:.2e}",
            flush=True,
        )


if __name__ == "__main__":
    register_optimizer_step_post_hook(look)
    on_cpu.train(cp=2)
    sys.exit(int(any(wrong)))
