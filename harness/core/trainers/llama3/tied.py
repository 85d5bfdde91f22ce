"""Tied embeddings in a pipeline: the first stage has the embedding, the last one a copy of it, which is its output.

Both copies start equal. When backward has ended, one has the embedding's part of the gradient, the other one the output's.
The sum over both ranks is the weight's gradient, so that both optimizers take the same step. A V-shaped schedule puts both
stages on one rank, which has one weight.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from harness.core.case.case import Case
from harness.core.trainers.llama3 import clip, pipeline
from harness.reference.model import Llama


def share_embedding(parts: list[nn.Module], indices: list[int], case: Case) -> None:
    """Let the last stage use the first stage's embedding module, if this rank has both and embeddings are tied; else do
    nothing."""
    if case.model.tied_embeddings and {0, case.n_stages - 1} == {*indices} and len(indices) > 1:
        first = model_of(parts[0])
        last = model_of(parts[-1])
        last.tok_embeddings = first.tok_embeddings


def drop_repeated_parameters(optimizers: list[Optimizer]) -> None:
    """Remove from each optimizer the parameters that an earlier one steps: a rank's parts may share a weight."""
    stepped_ids: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in stepped_ids]
            stepped_ids |= {*map(id, group["params"])}


def model_of(part: nn.Module) -> Llama:
    """Return the Llama model inside a wrapper. StopIteration if there is none."""
    return next(module for module in part.modules() if isinstance(module, Llama))


def weights(parts: list[nn.Module]) -> list[nn.Parameter]:
    """Return the embedding weights of a rank's parts, which are the tied weights, each once.

    Empty if no part has an embedding.
    """
    tables = [table for part in parts if (table := model_of(part).tok_embeddings) is not None]
    return list(dict.fromkeys(table.weight for table in tables))


def group_of_ends(case: Case, mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the group of a pipeline's first and last stage, over which the gradients of a tied weight are summed.

    None if this rank has neither stage, nothing is tied, there is no pipeline, or both stages are on one rank. Call it
    on every rank: it makes groups.
    """
    if mesh is None or case.dims.pp == 1 or not case.model.tied_embeddings:
        return None
    if case.features.schedule in pipeline.V_SHAPED:
        return None
    if case.dims.pp == 2:
        return mesh.get_group("pp")
    lines = mesh.mesh.movedim(axis(mesh), -1).reshape(-1, case.dims.pp).tolist()
    groups = [(line, dist.new_group([line[0], line[-1]], group_desc="pp_ends")) for line in lines]
    return next((group for line, group in groups if dist.get_rank() in (line[0], line[-1])), None)


def axis(mesh: DeviceMesh) -> int:
    """Return the position of pp among the mesh's axes."""
    return (mesh.mesh_dim_names or ()).index("pp")


def sum_gradients(parts: list[nn.Module], group: dist.ProcessGroup | None) -> None:
    """Sum this rank's slice of the tied weight's gradient over the group, in place.

    It does nothing if `group` is None.
    """
    if group is None:
        return
    for gradient in clip.local_gradients(weights(parts)):
        dist.all_reduce(gradient, group=group)


def tied_weight_copies(parts: list[nn.Module], group: dist.ProcessGroup | None) -> list[nn.Parameter]:
    """Return this rank's weights that are copies of the first stage's: the last stage's. Empty on all other ranks."""
    return weights(parts) if group is not None and dist.get_rank(group) > 0 else []
