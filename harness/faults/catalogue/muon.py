"""Faults of Muon, whose update is a function of whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

OWN_SLICE = ".muon:own_slice"


def _as_it_is(_: Callable[..., Any], matrix: Any, p: Any) -> Any:
    """Return the rank's own update as a DTensor of the parameter's placements, without cutting it. matrix: that update."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(matrix, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


_apart = op.together(
    op.instead(".muon:gather_matrix", lambda _, update: update.to_local()),
    op.instead(OWN_SLICE, _as_it_is),
)

each_tp_slice_orthogonalised_by_itself = fault(
    breaks="each tp rank orthogonalises its own rows or columns of a matrix, so that updates depend on the layout",
    bug="E08 deepspeedai/DeepSpeed #8437",
    case="muon_tp_2",
    caught_by="update traffic",
    named="orthogonalised in parts",
    does=_apart,
)
each_shard_orthogonalised_by_itself = fault(
    breaks="each rank orthogonalises the rows that FSDP left it, and scales the rate by their shape",
    bug="of the family of E08 deepspeedai/DeepSpeed #8437: Muon on what a rank happens to hold",
    case="muon_fsdp_2",
    caught_by="update traffic",
    named="orthogonalised in parts",
    does=op.together(_apart, op.instead(".muon:scale_of", lambda of, p, adjust_lr: of(p.to_local(), adjust_lr))),
)
rate_scaled_by_the_shape_of_a_slice = fault(
    breaks="Muon's rate is scaled by the shape of what a rank has of a matrix",
    bug="E09 microsoft/dion #111, PR #113: one scale for all that lies in a shard",
    case="muon_fsdp_2",
    caught_by="update",
    named="scaled by slices",
    does=op.instead(".muon:scale_of", lambda of, p, adjust_lr: of(p.to_local(), adjust_lr)),
)
embeddings_in_the_muon_group = fault(
    breaks="Muon's group is all matrices, embedding and output among them",
    bug="E10 deepspeedai/DeepSpeed PR #7641; NVIDIA/Megatron-LM #4641",
    case="muon_fsdp_2",
    caught_by="memory traffic update",
    named="another feature",
    does=op.instead(".recipe:rule_of", lambda _, training, fqn: "adamw" if fqn.endswith("norm.weight") else "muon"),
)


@fault(
    breaks="a matrix has an owner that orthogonalises it, and its update reaches no other rank",
    bug="E11 NVIDIA/Megatron-LM PR #5707: what Muon's owners updated never reached the weights",
    case="muon_fsdp_2",
    caught_by="update",
    named="not stepped",
)
@partial(op.change_result, OWN_SLICE)
def update_not_gathered(update: Any) -> Any:
    return update * 0 if op.this_rank() else update


@fault(
    breaks="every rank resumes with rank 0's average of gradients, the only one that was saved",
    bug="E12 KellerJordan/Muon #46: momentum of matrices of other ranks is not in the checkpoint",
    case="muon_fsdp_2_to_fsdp_2",
    caught_by="resume gradients",
    named="optimizer state lost",
)
@partial(op.after_call, ".checkpoint:read")
def momentum_of_another_slice(state: Mapping[str, Any], *_: Any, **__: Any) -> None:
    """Replace every rank's slice of Muon's momentum by rank 0's after loading."""
    import torch.distributed as dist

    for key, value in state["optimizer"].items():
        if key.endswith(".momentum_buffer"):
            dist.broadcast(value.to_local(), src=0)
