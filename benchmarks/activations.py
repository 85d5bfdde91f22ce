"""What autograd keeps of this project's model beside the plan's estimate: `python -m benchmarks.activations`.

One rank of a tp group whose collectives are fake: activations have their shapes, and no meaning. Kept are the storages that
autograd saves in forward, without parameters. The estimate is of fused norms, which the model has not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.plan.figures.activations import activation_bytes
from harness.plan.slices import BYTES
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.model import Llama
from harness.spec.case import Case
from harness.spec.dims import ParallelDims
from harness.spec.features import Features
from harness.trainers.llama3 import parallelize

MODEL = ModelConfig("block", 128, 4, 8, 4, 256, 384)
RECIPE = TrainingConfig(dtype="float32", global_batch=1, seq_len=256)


def kept(case: Case) -> int:
    """Bytes that autograd keeps of a forward pass on rank 0."""
    model = Llama(case.model)
    parallelize.shard(model, parallelize.build_mesh(case, "cpu"), case)
    own = {place(local(weight)) for weight in model.parameters()}
    seen: dict[int, Tensor] = {}

    def keep(tensor: Any) -> Any:
        if place(local(tensor)) not in own and tensor.is_floating_point():
            seen[place(local(tensor))] = local(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _ = model(torch.zeros(1, case.training.seq_len, dtype=torch.int64))
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


def local(tensor: Any) -> Tensor:
    found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.wait() if hasattr(found, "wait") else found


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    print("tp  sequence parallel  numbers kept for a token  estimated  unfused norms  the rest")
    for tp, sequence_parallel in ((1, True), (4, True), (4, False)):
        case = Case("block", "-", ParallelDims(tp=tp), MODEL, RECIPE, Features(sequence_parallel=sequence_parallel))
        token = case.training.seq_len * BYTES[case.training.dtype]
        estimated = activation_bytes(case, 0) / token
        norms = (2 * case.model.n_layers + 1) * case.model.dim / (tp if sequence_parallel else 1)
        found = kept(case) / token
        rest = found - estimated - norms
        print(f"{tp:<4}{sequence_parallel!s:<19}{found:<26.0f}{estimated:<11.0f}{norms:<15.0f}{rest:.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
