"""Ranks that die, hang or leave: each must end in bounded time with the culprit named and its victims not blamed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from harness.faults import Fired, fault, replace


def _before_step(step: int, rank: int, do: Callable[[], None]) -> None:
    """Calls `do` on one rank just before its optimizer steps for the `step`-th time."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    seen: list[Any] = []

    def hook(*args: Any) -> None:
        seen.append(None)
        if len(seen) == step and int(os.environ.get("RANK", 0)) == rank:
            do()

    register_optimizer_step_pre_hook(hook)


@fault(
    breaks="rank 1 is killed in step 2, as by the kernel when memory runs out",
    bug="Z-class: a rank dies, the others wait for it",
    case="fsdp_2",
    caught_by="completed",
    named="rank 1 died by SIGKILL",
)
def rank_killed_in_step_2(fired: Fired) -> None:
    def die() -> None:
        fired()
        os.kill(os.getpid(), signal.SIGKILL)

    _before_step(2, 1, die)


@fault(
    breaks="rank 1 stops for ever in step 2, the others wait in their next collective",
    bug="Z-class: a rank stalls (a data loader, a file system, a lock)",
    case="fsdp_2",
    caught_by="completed",
    named="rank 1 hung",
    hangs=True,
)
def rank_hangs_in_step_2(fired: Fired) -> None:
    def stall() -> None:
        fired()
        time.sleep(3600)

    _before_step(2, 1, stall)


@fault(
    breaks="rank 1 raises in step 2",
    bug="Z-class: one rank raises, the others see a lost connection",
    case="fsdp_2",
    caught_by="completed",
    named="rank 1 raised",
)
def rank_raises_in_step_2(fired: Fired) -> None:
    def fail() -> None:
        fired()
        raise FloatingPointError("a deliberate error in step 2")

    _before_step(2, 1, fail)


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


@fault(
    breaks="rank 1 leaves the training loop one step early, as its data is at an end",
    bug="Z01 pytorch/torchtitan #1634, #1618, #1627: ranks run different numbers of steps",
    case="fsdp_2",
    caught_by="completed",
    named="rank 1 left early",
)
def rank_leaves_a_step_early(fired: Fired) -> None:
    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def short(self: Any, last_step: int | None = None, **kwargs: Any) -> None:
            steps = self.case.training.steps if last_step is None else last_step
            if _rank() == 1:
                fired()
                steps -= 1
            original(self, steps, **kwargs)

        return short

    replace(trainer.Trainer, "train", make)


@fault(
    breaks="rank 1 has one microbatch in step 2 where the others have two",
    bug="Z01 pytorch/torchtitan #1627: ranks disagree on the number of microbatches",
    case="fsdp_2_cp_2_accum",
    caught_by="completed",
    named="rank 1 issued",
    hangs=True,
)
def ranks_disagree_on_the_number_of_microbatches(fired: Fired) -> None:
    from harness.trainers.llama3 import data

    def make(original: Any) -> Any:
        def fewer(self: Any, *args: Any) -> Any:
            microbatches = original(self, *args)
            if _rank() != 1 or self.samples != 2 * self.case.training.global_batch:
                return microbatches
            fired()
            return microbatches[:1]

        return fewer

    replace(data.Microbatches, "step", make)


@fault(
    breaks="rank 3 skips one reduction in step 2, and gloo pairs its next one, of equal size, with it",
    bug="Z-class: a rank skips a collective under a condition that only it meets",
    case="fsdp_4",
    caught_by="completed",
    named="rank 3 issued all_gather",
    hangs=True,
)
def rank_skips_a_collective_of_equal_size(fired: Fired) -> None:
    import torch.distributed as dist

    count = [0]

    def make(original: Any) -> Any:
        def skipping(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if _rank() == 3 and count[0] == 5:
                fired()
                return None
            return original(tensor, *args, **kwargs)

        return skipping

    replace(dist, "all_reduce", make)


@fault(
    breaks="rank 2 reduces two tensors of different sizes in the other order than its peers",
    bug="Z03 NVIDIA/Megatron-LM #2218: parameters reduced in the order of a set",
    case="fsdp_4",
    caught_by="completed",
    named="rank 2 issued all_reduce",
)
def rank_reduces_in_another_order(fired: Fired) -> None:
    import torch
    import torch.distributed as dist

    def both() -> None:
        sizes = (64, 256)
        fired()
        for size in reversed(sizes) if _rank() == 2 else sizes:
            dist.all_reduce(torch.zeros(size))

    for rank in range(4):
        _before_step(2, rank, both)


@fault(
    breaks="rank 0 alone waits in a barrier, as it writes a log or a checkpoint that the others do not",
    bug="Z-class: a collective inside `if rank == 0`",
    case="fsdp_2",
    caught_by="completed",
    named="rank 0 issued barrier",
    hangs=True,
)
def barrier_on_rank_0_only(fired: Fired) -> None:
    import torch.distributed as dist

    def wait() -> None:
        fired()
        dist.barrier()

    _before_step(2, 0, wait)


@fault(
    breaks="rank 2 runs out of memory while it builds the model",
    bug="Z-class: a rank dies before the first step",
    case="fsdp_4",
    caught_by="completed",
    named="rank 2 died by SIGKILL",
)
def rank_dies_while_building(fired: Fired) -> None:
    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def build(*args: Any) -> Any:
            if _rank() == 2:
                fired()
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)

        return build

    replace(trainer, "build_model", make)


@fault(
    breaks="the data loader of rank 1 never delivers its second batch",
    bug="Z-class: a rank stalls in what is no collective",
    case="ddp_2",
    caught_by="completed",
    named="rank 1 hung",
    hangs=True,
)
def loader_stalls(fired: Fired) -> None:
    from harness.trainers.llama3 import data

    def make(original: Any) -> Any:
        def stalling(self: Any, *args: Any) -> Any:
            if _rank() == 1 and self.samples:
                fired()
                time.sleep(3600)
            return original(self, *args)

        return stalling

    replace(data.Microbatches, "step", make)


@fault(
    breaks="rank 1 finds a reason to stop and exits with code 0 in the middle of step 2",
    bug="Z-class: a rank ends its process as if all were well",
    case="fsdp_2",
    caught_by="completed",
    named="rank 1 left early",
)
def rank_exits_as_if_well(fired: Fired) -> None:
    def leave() -> None:
        fired()
        raise SystemExit(0)

    _before_step(2, 1, leave)


@fault(
    breaks="rank 1 reduces the loss that it reports only after the next step's token count, and gloo pairs the two",
    bug="of the family of Z03: reductions of equal size in another order, which gloo pairs without an error",
    case="fsdp_2",
    caught_by="collective_order",
    named="ranks of a group do not issue the same collectives",
)
def loss_reduced_after_the_next_count(fired: Fired) -> None:
    import torch
    import torch.distributed as dist

    late: list[Any] = []
    count = [0]

    def make(original: Any) -> Any:
        def in_another_order(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if _rank() != 1:
                return original(tensor, *args, **kwargs)
            count[0] += tensor.dtype == torch.int64
            if count[0] == 2 and tensor.dim() == 0 and tensor.dtype == torch.float64 and seen_norm(tensor):
                late.append(tensor)
                return None
            result = original(tensor, *args, **kwargs)
            if late and count[0] == 3:
                fired()
                original(late.pop(), *args, **kwargs)
            return result

        return in_another_order

    norms: list[int] = []

    def seen_norm(tensor: Any) -> bool:
        """Step 2 reduces two numbers after the count: the norm, and the loss."""
        norms.append(1)
        return len(norms) == 2

    replace(dist, "all_reduce", make)


@fault(
    breaks="rank 1 reduces the gradient norm in another dtype of the same size than its peers",
    bug="of the family of N05 deepspeedai/DeepSpeed #5170: ranks that disagree on the dtype of a reduction",
    case="fsdp_2",
    caught_by="collective_order",
    named="ranks of a group do not issue the same collectives",
)
def rank_reduces_in_another_dtype(fired: Fired) -> None:
    import torch
    import torch.distributed as dist

    def make(original: Any) -> Any:
        def as_integers(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if _rank() != 1 or tensor.dtype != torch.float64:
                return original(tensor, *args, **kwargs)
            fired()
            return original(tensor.view(torch.int64), *args, **kwargs)

        return as_integers

    replace(dist, "all_reduce", make)


@fault(
    breaks="rank 1 of 4 aborts in step 2, as glibc does when the heap is damaged; others raise it as an error of pipelining",
    bug="Z-class: a rank aborts, and the others raise something else than a lost connection",
    case="pp_2_tp_2",
    caught_by="completed",
    named="rank 1 died by SIGABRT",
)
def rank_aborts_in_a_pipeline(fired: Fired) -> None:
    def abort() -> None:
        fired()
        os.write(2, b"malloc(): unaligned tcache chunk detected\n")
        os.abort()

    _before_step(2, 1, abort)


@fault(
    breaks="after a pass the last stage broadcasts its loss over the group of the pipeline, and the first reduces it",
    bug="Z-class: the members of a pipeline's group issue different collectives",
    case="pp_2",
    caught_by="completed",
    named="issued all_reduce",
    hangs=True,
)
def stages_issue_different_collectives(fired: Fired) -> None:
    import torch
    import torch.distributed as dist

    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def and_share(*args: Any, **kwargs: Any) -> Any:
            result, loss = original(*args, **kwargs), torch.zeros(4)
            fired()
            if _rank() == 0:
                dist.all_reduce(loss)
            else:
                dist.broadcast(loss, src=1)
            return result

        return and_share

    replace(trainer, "run_pipeline", make)
