"""Changes to the trainer that tests run with `--fault`: mistakes that shapes, losses or a listing of groups do not show."""

from __future__ import annotations

from typing import Any

from harness.faults import Fault, fault
from harness.faults import operators as op


def wrong(breaks: str, case: str, caught_by: str, does: Any, named: str = "unknown") -> Fault:
    return fault(breaks=breaks, bug="made for a test", case=case, caught_by=caught_by, named=named, does=does)


# ---- units that stay gathered

_optimizers: list[Any] = []


def _remembered(original: Any, *args: Any, **rest: Any) -> Any:
    _optimizers.append(original(*args, **rest))
    return _optimizers[-1]


def _clip_what_is_stepped(original: Any, parameters: Any, *rest: Any, **more: Any) -> Any:
    stepped = [p for optimizer in _optimizers for group in optimizer.param_groups for p in group["params"]]
    return original(stepped, *rest, **more)


def _never_freed(model: Any, *_: Any) -> None:
    model.set_reshard_after_backward(False)


units_stay_gathered = wrong(
    "FSDP2's units are not freed after backward, so that the next step's forward pass computes with old weights",
    "fsdp_2",
    "reshard traffic memory",
    op.together(
        op.after_call(".parallelize:apply_fsdp", _never_freed),
        op.instead(".recipe:build_optimizer", _remembered),
        op.instead(".clip:clip_gradients", _clip_what_is_stepped),
    ),
    "left gathered by backward",
)

# ---- numbers


def _rounded(original: Any, *args: Any) -> int:
    import torch

    return int(torch.tensor(original(*args)).bfloat16())


rounded_token_count = wrong(
    "the number of valid tokens that the loss is divided by is rounded to bfloat16",
    "fsdp_4",
    "gradients",
    op.instead(".trainer:count_valid", _rounded),
    "gradients scaled",
)


def _part_of_parameters(original: Any, model: Any, training: Any) -> Any:
    own = {id(p) for index, p in enumerate(model.parameters()) if index % 2 == op.this_rank()}
    groups = [group | {"params": [p for p in group["params"] if id(p) in own]} for group in original(model, training)]
    return [group for group in groups if group["params"]]


each_rank_steps_on_a_half = wrong(
    "each rank's optimizer has every second parameter, and nothing exchanges them",
    "ddp_2",
    "completed",
    op.instead(".recipe:parameter_groups", _part_of_parameters),
    "incomplete",
)
interpolated_band_is_a_step = wrong(
    "between the two limits of Llama 3.1's rescaling a frequency is either kept or divided, not interpolated",
    "tp_2_rope_scaling",
    "loss",
    op.change_result("harness.reference.model:kept_share", lambda share: (share > 0.5).to(share.dtype)),
)

# ---- the sequence

_lengths: list[int] = []


def _whole(original: Any, self: Any, length: int | None = None) -> Any:
    _lengths.append(length or 0)
    return original(self, None)


def _cut_after_sharding(original: Any, tokens: Any, labels: Any, mesh: Any, case: Any) -> Any:
    part, length = original(tokens, labels, mesh, case), _lengths[-1] // case.dims.cp
    positions = part.positions[:length]
    return part._replace(tokens=part.tokens[:, :length], labels=part.labels[:, :length], positions=positions)


short_step_is_cut_after_sharding = wrong(
    "a step of half the length takes the first half of what each cp rank has of the whole sequence",
    "cp_2_variable_length_contiguous",
    "samples",
    op.together(
        op.instead(".data:Microbatches.step", _whole),
        op.instead(".trainer:sequence_part", _cut_after_sharding),
    ),
    "sequence cut otherwise",
)

# ---- what no number shows


def _switched_on(fired: Any) -> None:
    import torch

    fired()
    torch.autograd.set_detect_anomaly(True)


anomaly_detection_from_the_start = wrong(
    "anomaly detection is switched on before the trainer is built",
    "fsdp_2",
    "settings",
    _switched_on,
    "another setting",
)


def _with_copies(original: Any, self: Any) -> Any:
    copies = [parameter.detach().clone() for part in self.model_parts for parameter in part.parameters()]
    try:
        return original(self)
    finally:
        copies.clear()


copies_for_the_time_of_a_step = wrong(
    "all weights are copied before a step's forward pass and given up when the step is over",
    "ddp_2",
    "memory",
    op.instead(".trainer:Trainer.train_step", _with_copies),
    "copied",
)


def _in_another_order(original: Any, device_type: str, shape: Any, **rest: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(device_type, [0, 2, 1, 3], **rest)


mesh_in_another_order = wrong(
    "the mesh lists its ranks in another order than they hold their slices, so that a checkpoint would be torn",
    "fsdp_4",
    "placements",
    op.instead(".parallelize:init_device_mesh", _in_another_order),
)
