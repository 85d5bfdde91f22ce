"""A training script whose gradients are reduced over a process group of its own, made in the way HOW, with its store in the
file OWN_STORE."""

import datetime
import os

import torch
import torch.distributed as dist
from torch import nn

FLOAT = torch.device("cpu")
LONG = datetime.timedelta(seconds=60)


class OverAnother(dist.ProcessGroup):
    """Hands on to a backend."""

    inner: dist.ProcessGroup

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> dist.Work:
        return self.inner.allreduce(tensors)

    def getBackendName(self) -> str:
        return "own"


class ByStore(dist.ProcessGroup):
    """Carries numbers by a store: nothing of torch's is inside."""

    store: dist.Store
    turn = 0

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> dist.Work:
        self.turn += 1
        for number, tensor in enumerate(tensors):
            self.store.set(f"{self.turn} {number} {self.rank()}", tensor.numpy().tobytes())
        for number, tensor in enumerate(tensors):
            parts = [self.store.get(f"{self.turn} {number} {rank}") for rank in range(self.size())]
            tensor.copy_(sum(torch.frombuffer(bytearray(part), dtype=tensor.dtype).view_as(tensor) for part in parts))
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def getBackendName(self) -> str:
        return "bystore"


def store(rank: int, world: int) -> dist.Store:
    return dist.PrefixStore("own", dist.FileStore(os.environ["OWN_STORE"], world))


def with_backend(own: dist.Store, rank: int, world: int) -> dist.ProcessGroup:
    """As torchft makes them."""
    group = dist.ProcessGroup(own, rank, world)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(
        FLOAT, dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(dist.PrefixStore("in", own), rank, world, LONG)
    )
    return group


def made(how: str, rank: int, world: int) -> object:
    if how in ("backend_of_a_group", "registered_class", "registered_creator"):
        dist.init_process_group("gloo")
    if how == "backend_of_a_group":
        return dist.group.WORLD._get_backend(FLOAT)
    own = store(rank, world)
    if how == "backend":
        return dist.ProcessGroupGloo(own, rank, world, LONG)
    if how == "without_a_name":
        return with_backend(own, rank, world)
    if how == "helper":  # of torch's, as trainers that copy init_process_group call it; these ranks are not the job's
        group, _ = dist.distributed_c10d._new_process_group_helper(
            world, rank, [], "gloo", own, group_name="updates", timeout=LONG
        )
        dist.distributed_c10d._world.pg_group_ranks[group] = {place: place for place in range(world)}
        return group
    if how == "over_another":
        group = OverAnother(rank, world)
        group.inner = dist.ProcessGroupGloo(own, rank, world, LONG)
        return group
    if how == "registered_creator":
        dist.Backend.register_backend(how, lambda *_: dist.ProcessGroupGloo(own, rank, world, LONG), devices=["cpu"])
        return dist.new_group(backend=how)
    group = ByStore(rank, world)
    group.store = own
    if how == "registered_class":
        dist.Backend.register_backend(how, lambda *_: group, devices=["cpu"])
        return dist.new_group(backend=how)
    return group


def main() -> None:
    how, rank, world = os.environ["HOW"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = made(how.removesuffix("_of_ddp"), rank, world)
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(8, 8)
    if how.endswith("_of_ddp"):
        model = nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(4):
        model(torch.randn(4, 8)).sum().backward()
        for parameter in model.parameters() if not how.endswith("_of_ddp") else ():
            if how in ("over_another", "registered_class", "registered_creator"):
                dist.all_reduce(parameter.grad, group=group)
            else:
                group.allreduce([parameter.grad]).wait()
            parameter.grad /= world
        optimizer.step()
        optimizer.zero_grad()
    print("first number", next(model.parameters()).flatten()[0].item())


if __name__ == "__main__":
    main()
