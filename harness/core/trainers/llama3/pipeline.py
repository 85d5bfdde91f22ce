"""Pipeline parallel: the model cut into stages, and torch's schedules that run them.

A rank holds one model part a stage, each with the reference's names; a part that is not the first is given activations.
Every rank reads its batch: the first stage needs its tokens, the last its labels, all of them the number of valid tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from harness.core.case.case import Case
from harness.core.trainers.llama3.parallelize import DTYPES
from harness.reference.model import Llama

LossFunction = Callable[[Tensor, Tensor], Tensor]
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def stages_here(case: Case, mesh: DeviceMesh | None) -> list[int]:
    """Return the stages of this rank, ascending; [0] without a pipeline. Stages are dealt out to ranks in rounds.

    A V-shaped schedule deals the second round in reverse.
    """
    if mesh is None or case.dims.pp == 1:
        return [0]
    rank = mesh.get_local_rank("pp")
    pp = case.dims.pp
    if case.features.schedule in V_SHAPED:
        return [rank, 2 * pp - 1 - rank]
    return list(range(rank, case.n_stages, pp))


def cut_to_stage(model: Llama, stage: int, case: Case) -> None:
    """Delete from a whole model, in place, the layers and modules that the stage does not hold. One stage keeps all.

    The first stages take the layers that are left over. Of the layers that are dealt out, the first and last few may
    stand for embedding and output. A tied embedding is in both (tied.py).
    """
    n_stages = case.n_stages
    features = case.features
    if n_stages == 1:
        return
    dealt = np.arange(-features.first_stage_less_layers, len(model.layers) + features.last_stage_less_layers)
    own_layers = set(np.array_split(dealt, n_stages)[stage])
    for index in range(len(model.layers)):
        if index not in own_layers:
            del model.layers[str(index)]
    if stage > 0 and not (case.model.tied_embeddings and stage == n_stages - 1):
        model.tok_embeddings = None
    if stage < n_stages - 1:
        model.norm = model.output = None


def build_schedule(
    parts: list[nn.Module], loss: LossFunction, case: Case, mesh: DeviceMesh | None, device: torch.device
) -> Any:
    """Return torch's schedule for this rank's stages; None without pp. Its step runs microbatches * local_batch samples.

    loss: called with a microbatch's logits and labels. scale_grads: the loss is a sum that is scaled already; torch
    would divide by the number of microbatches.
    """
    if mesh is None or case.dims.pp == 1:
        return None
    indices = stages_here(case, mesh)
    stages = [build_stage(part, index, case, mesh, device) for part, index in zip(parts, indices, strict=True)]
    kind: Any = get_schedule_class(case.features.schedule)
    single = issubclass(kind, PipelineScheduleSingle)
    return kind(stages[0] if single else stages, case.microbatches, loss_fn=loss, scale_grads=False)


def build_stage(part: nn.Module, index: int, case: Case, mesh: DeviceMesh, device: torch.device) -> PipelineStage:
    """Return torch's stage of a model part, with its shapes.

    Shapes are given: without them torch runs an extra forward and backward pass to find them. Trap: they must be true of the
    logits too, which are sent nowhere; torch 2.11 compares them.
    """
    dtype = DTYPES[case.training.compute_dtype or case.training.dtype]
    samples = case.local_batch
    length = case.training.seq_len // case.dims.cp
    tokens = torch.empty(samples, length, dtype=torch.int64, device="meta")
    between = torch.empty(activation_shape(case), dtype=dtype, device="meta", requires_grad=True)
    logits = torch.empty(samples, length, case.model.vocab_size, dtype=dtype, device="meta", requires_grad=True)
    return PipelineStage(
        part,
        index,
        case.n_stages,
        device,
        input_args=tokens if index == 0 else between,
        output_args=logits if index == case.n_stages - 1 else between,
        group=mesh.get_group("pp"),
    )


def activation_shape(case: Case) -> tuple[int, int, int]:
    """Return the shape [b, s, dim] of the activations that a stage sends on for one microbatch.

    Under cp, and tp with sequence parallel, s is this rank's part of the sequence.
    """
    degree = case.dims.cp * (case.dims.tp if case.features.sequence_parallel else 1)
    return case.local_batch, case.training.seq_len // degree, case.model.dim


def run(schedule: Any, tokens: Tensor, labels: Tensor, **rest: Tensor | None) -> None:
    """Run forward and backward of one batch, which the schedule cuts into microbatches along dim 0; gradients are left
    in .grad.

    rest: tensors that all samples share, which are expanded to each sample; None is left out.
    """
    shared = {name: value.expand(len(tokens), -1) for name, value in rest.items() if value is not None}
    received = (tokens,) if has_first_stage(schedule) else ()
    schedule.step(*received, target=labels, return_outputs=False, **shared)  # or all logits would be kept


def has_first_stage(schedule: Any) -> bool:
    """Return whether this rank has the first stage, which is given the tokens."""
    stages = [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages
    return any(stage.is_first for stage in stages)


def group_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the pp group, whose ranks hold the other stages. None without a pipeline."""
    return mesh.get_group("pp") if mesh is not None and "pp" in (mesh.mesh_dim_names or ()) else None
