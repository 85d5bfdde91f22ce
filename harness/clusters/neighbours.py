"""The shapes that the other stages of a pipeline would have sent, answered on one stage alone.

torch's stages vote whether each was given the shapes between them; alone, a stage's own vote is that of all. Without
them each asks its neighbours. Then gradients come back as the stage's own outputs are, and the input is the case's
hidden state.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.core.case.case import Case


def vote_alone() -> None:
    """Patch torch's schedules so that a stage's own vote decides whether shapes are known.

    It does nothing before torch 2.13.
    """
    from torch.distributed.pipelining import schedules, stage

    modes = getattr(stage, "InferenceMode", None)
    original = getattr(schedules._PipelineSchedule, "_warmup_p2p", None)
    if modes is None or original is None:
        return

    def vote(schedule: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        """Run torch's own vote, then set each stage's mode by its own knowledge of shapes."""
        original(schedule, stages, has_backward, p2p_done)
        for stage_object in stages:
            is_static = not modes.needs_dynamic(stage_object._user_meta, has_backward)
            stage_object._inference_mode = modes.STATIC if is_static else modes.DYNAMIC

    schedules._PipelineSchedule._warmup_p2p = vote


def answer_shapes(case: Case) -> None:
    """Patch torch's stages so that the shapes of neighbours' tensors come from the case.

    It does nothing before torch 2.13. Alone, shapes are neither sent nor received, so that no group moves bytes at one
    end only.
    """
    from torch.distributed.pipelining import _utils, stage

    if not hasattr(stage.PipelineStage, "_recv_meta"):
        return

    def own_metadata(stage_object: Any, source: int) -> Any:
        """Return a stage's metadata of gradients from a later stage, or of the hidden state from an earlier one."""
        if source > stage_object.stage_index:
            return _utils._StageBackwardMeta(tuple(map(_gradient_meta, stage_object._stage_meta.outputs)))
        return _utils._StageForwardMeta((_utils.extract_tensor_meta(hidden_state(case, stage_object.submod)),))

    stage.PipelineStage._recv_meta = own_metadata
    stage.PipelineStage._send_meta = lambda *_: None


def _gradient_meta(output: Any) -> Any:
    """Return the metadata of an output's gradient, None where it needs none."""
    return dataclasses.replace(output, requires_grad=False) if output.requires_grad else None


def hidden_state(case: Case, module: nn.Module) -> torch.Tensor:
    """Return an empty hidden state of a microbatch, as the stage before sends it: [local_batch, s, dim].

    It is a DTensor over tp if the module's parameters are, cut along the sequence with sequence parallel.
    """
    mesh = _tp_mesh(module)
    sharded = case.features.sequence_parallel
    rows = case.seq_len(case.steps[0]) // case.dims.cp // (case.dims.tp if mesh is not None and sharded else 1)
    dtype = getattr(torch, case.training.compute_dtype or case.training.dtype)
    local = torch.empty(case.local_batch, rows, case.model.dim, dtype=dtype, requires_grad=True)
    if mesh is None:
        return local
    return DTensor.from_local(local, mesh, [Shard(1) if sharded else Replicate()], run_check=False)


def _tp_mesh(module: nn.Module) -> DeviceMesh | None:
    """Return the tp mesh of the module's parameters; None if no parameter is a DTensor on one."""
    meshes = (parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor))
    return next((mesh["tp"] for mesh in meshes if "tp" in (mesh.mesh_dim_names or ())), None)
