"""Faults of ranks that die, hang or leave: each must end in bounded time with the culprit named and its victims not blamed."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op
from harness.faults.catalogue.gradients import ALL_REDUCE, delay_reduction


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


rank_killed_in_step_2 = fault(
    breaks="rank 1 is killed in step 2, as by the kernel when memory runs out",
    bug="Z-class: a rank dies, the others wait for it",
    case="fsdp_2",
    caught_by="completed",
    named="a process failed",
    does=op.on_rank(1, op.before_step(2, _die)),
)
rank_leaves_a_step_early = fault(
    breaks="rank 1 leaves the training loop one step early, as its data is at an end",
    bug="Z01 pytorch/torchtitan #1634, #1618, #1627: ranks run different numbers of steps",
    case="fsdp_2",
    caught_by="completed",
    named="a process failed",
    does=op.on_rank(1, op.override_argument(".trainer:Trainer.train", last_step=2)),
)


def _as_integers(tensor: Any) -> Any:
    """Return a view of a float64 tensor as int64."""
    import torch

    return tensor.view(torch.int64)


ranks_disagree_on_the_number_of_microbatches = fault(
    breaks="rank 1 has one microbatch in step 2 where the others have two",
    bug="Z01 pytorch/torchtitan #1627: ranks disagree on the number of microbatches",
    case="fsdp_2_cp_2_accum",
    caught_by="completed",
    named="a process failed",
    hangs=True,
    does=op.on_rank(1, op.change_result(".data:Microbatches.step", lambda batches: batches[:1], when=op.nth_call(2))),
)


@fault(
    breaks="rank 2 reduces two tensors of different sizes in the other order than its peers",
    bug="Z03 NVIDIA/Megatron-LM #2218: parameters reduced in the order of a set",
    case="fsdp_4",
    caught_by="completed",
    named="a process failed",
)
@partial(op.before_step, 2)
def rank_reduces_in_another_order() -> None:
    """Reduce tensors of 64 and 256 elements, on rank 2 in the other order."""
    import torch
    import torch.distributed as dist

    sizes = (256, 64) if op.this_rank() == 2 else (64, 256)
    for size in sizes:
        dist.all_reduce(torch.zeros(size))


rank_reduces_in_another_dtype = fault(
    breaks="rank 1 reduces the gradient norm in another dtype of the same size than its peers",
    bug="of the family of N05 deepspeedai/DeepSpeed #5170: ranks that disagree on the dtype of a reduction",
    case="fsdp_2",
    caught_by="collective_order",
    named="collectives out of order",
    does=op.on_rank(
        1,
        op.change_argument(ALL_REDUCE, tensor=_as_integers, when=lambda reduced, *_, **__: reduced.is_floating_point()),
    ),
)
loss_reduced_after_the_next_count = fault(
    breaks="rank 1 reduces the loss that it reports only after the next step's token count, and gloo pairs the two",
    bug="of the family of Z03: reductions of equal size in another order, which gloo pairs without an error",
    case="fsdp_2",
    caught_by="collective_order",
    named="collectives out of order",
    does=op.on_rank(1, op.instead(ALL_REDUCE, delay_reduction(op.nth_call(6)))),  # of count, norm and loss in each step
)
