"""Ranks that die, hang or leave: each must end in bounded time with the culprit named and its victims not blamed."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

from harness.faults import Fired, fault, replace
from harness.faults import operators as op

ALL_REDUCE = "torch.distributed:all_reduce"

# ---- one rank dies, stops or leaves


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
rank_hangs_in_step_2 = fault(
    breaks="rank 1 stops for ever in step 2, the others wait in their next collective",
    bug="Z-class: a rank stalls (a data loader, a file system, a lock)",
    case="fsdp_2",
    caught_by="completed",
    named="a process failed",
    hangs=True,
    does=op.on_rank(1, op.before_step(2, op.call("time:sleep", 3600))),
)


@fault(
    breaks="rank 1 raises in step 2",
    bug="Z-class: one rank raises, the others see a lost connection",
    case="fsdp_2",
    caught_by="completed",
    named="a process failed",
)
@partial(op.on_rank, 1)
@partial(op.before_step, 2)
def rank_raises_in_step_2() -> None:
    raise FloatingPointError("a deliberate error in step 2")


rank_exits_as_if_well = fault(
    breaks="rank 1 finds a reason to stop and exits with code 0 in the middle of step 2",
    bug="Z-class: a rank ends its process as if all were well",
    case="fsdp_2",
    caught_by="completed",
    named="a process failed",
    does=op.on_rank(1, op.before_step(2, op.call("sys:exit", 0))),
)
rank_leaves_a_step_early = fault(
    breaks="rank 1 leaves the training loop one step early, as its data is at an end",
    bug="Z01 pytorch/torchtitan #1634, #1618, #1627: ranks run different numbers of steps",
    case="fsdp_2",
    caught_by="completed",
    named="a process failed",
    does=op.on_rank(1, op.override_argument(".trainer:Trainer.train", last_step=2)),
)
rank_dies_while_building = fault(
    breaks="rank 2 runs out of memory while it builds the model",
    bug="Z-class: a rank dies before the first step",
    case="fsdp_4",
    caught_by="completed",
    named="a process failed",
    does=op.on_rank(2, op.before_call(".trainer:build_model", _die)),
)


@fault(
    breaks="rank 1 of 4 aborts in step 2, as glibc does when the heap is damaged; others raise it as an error of pipelining",
    bug="Z-class: a rank aborts, and the others raise something else than a lost connection",
    case="pp_2_tp_2",
    caught_by="completed",
    named="a process failed",
)
@partial(op.on_rank, 1)
@partial(op.before_step, 2)
def rank_aborts_in_a_pipeline() -> None:
    os.write(2, b"malloc(): unaligned tcache chunk detected\n")
    os.abort()


loader_stalls = fault(
    breaks="the data loader of rank 1 never delivers its second batch",
    bug="Z-class: a rank stalls in what is no collective",
    case="ddp_2",
    caught_by="completed",
    named="a process failed",
    hangs=True,
    does=op.on_rank(1, op.before_call(".data:Microbatches.step", op.call("time:sleep", 3600), when=op.nth_call(2))),
)

# ---- ranks issue different collectives


def _as_integers(tensor: Any) -> Any:
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
rank_skips_a_collective_of_equal_size = fault(
    breaks="rank 3 skips one reduction in step 2, and gloo pairs its next one, of equal size, with it",
    bug="Z-class: a rank skips a collective under a condition that only it meets",
    case="fsdp_4",
    caught_by="completed",
    named="a process failed",
    hangs=True,
    does=op.on_rank(3, op.skip_call(ALL_REDUCE, when=op.nth_call(5))),
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
    import torch
    import torch.distributed as dist

    for size in (256, 64) if op.this_rank() == 2 else (64, 256):
        dist.all_reduce(torch.zeros(size))


barrier_on_rank_0_only = fault(
    breaks="rank 0 alone waits in a barrier, as it writes a log or a checkpoint that the others do not",
    bug="Z-class: a collective inside `if rank == 0`",
    case="fsdp_2",
    caught_by="completed",
    named="a process failed",
    hangs=True,
    does=op.on_rank(0, op.before_step(2, op.call("torch.distributed:barrier"))),
)
rank_reduces_in_another_dtype = fault(
    breaks="rank 1 reduces the gradient norm in another dtype of the same size than its peers",
    bug="of the family of N05 deepspeedai/DeepSpeed #5170: ranks that disagree on the dtype of a reduction",
    case="fsdp_2",
    caught_by="collective_order",
    named="collectives out of order",
    does=op.on_rank(
        1,
        op.change_argument(
            ALL_REDUCE, tensor=_as_integers, when=lambda tensor, *_, **__: tensor.dtype.is_floating_point
        ),
    ),
)


@fault(
    breaks="after a pass the last stage broadcasts its loss over the group of the pipeline, and the first reduces it",
    bug="Z-class: the members of a pipeline's group issue different collectives",
    case="pp_2",
    caught_by="completed",
    named="a process failed",
    hangs=True,
)
@partial(op.after_call, ".trainer:run_pipeline")
def stages_issue_different_collectives(*_: Any, **__: Any) -> None:
    import torch
    import torch.distributed as dist

    loss = torch.zeros(4)
    if op.this_rank() == 0:
        dist.all_reduce(loss)
    else:
        dist.broadcast(loss, src=1)


@fault(
    breaks="rank 1 reduces the loss that it reports only after the next step's token count, and gloo pairs the two",
    bug="of the family of Z03: reductions of equal size in another order, which gloo pairs without an error",
    case="fsdp_2",
    caught_by="collective_order",
    named="collectives out of order",
)
def loss_reduced_after_the_next_count(fired: Fired) -> None:
    """A step reduces the count, the norm and the loss, in that order."""
    import torch.distributed as dist

    waiting: list[Any] = []
    number = [0]

    def make(original: Any) -> Any:
        def in_another_order(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            number[0] += 1
            if number[0] == 6:
                return waiting.append(tensor)
            result = original(tensor, *args, **kwargs)
            if waiting:
                fired()
                original(waiting.pop(), *args, **kwargs)
            return result

        return in_another_order

    if op.this_rank() == 1:
        replace(dist, "all_reduce", make)
