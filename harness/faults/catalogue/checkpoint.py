"""Faults of checkpoints: what they hold, and what is read back from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

State = dict[str, Any]
LOAD = "torch.distributed.checkpoint:load"
SAVE = "torch.distributed.checkpoint:save"

# ---- what is read: torch.distributed.checkpoint.load fills a state dict in place


def _not_loaded(take: Callable[[State], tuple[State, str]]) -> op.Operator:
    """Return the operator that keeps one item of the state from being loaded: it has its old value afterwards.

    take: state -> (the dict that holds the item, its key).
    """

    def load(original: Any, state: State, *args: Any, **kwargs: Any) -> None:
        holder, key = take(state)
        value = holder.pop(key)
        original(state, *args, **kwargs)
        holder[key] = value

    return op.instead(LOAD, load)


optimizer_state_not_restored = fault(
    breaks="the optimizer's state is not read from the checkpoint",
    bug="S01 pytorch/torchtitan #275: an item of the state has no effect after resuming",
    case="fsdp_4_to_hsdp_2x2",
    caught_by="resume update gradients",
    named="optimizer state lost",
    does=_not_loaded(lambda state: (state, "optimizer")),
)
one_parameter_not_loaded = fault(
    breaks="a key that is not requested of the checkpoint keeps its old value, and loading is not strict",
    bug="S05, S14: partial loads (strict=False) leave a parameter at its initial value",
    case="tp_2_to_fsdp_2",
    caught_by="resume loss gradients",
    named="parameters not loaded",
    does=_not_loaded(lambda state: (state["model"], "layers.1.attention.wq.weight")),
)
data_position_starts_anew = fault(
    breaks="the data loader begins its epoch again",
    bug="S01 pytorch/torchtitan #275: an item of the state has no effect after resuming",
    case="ddp_4_to_fsdp_2",
    caught_by="resume samples loss gradients",
    named="data position",
    does=op.after_call(LOAD, lambda state, **_: state.update(samples=0)),
)


@fault(
    breaks="optimizer state is matched by position, so two parameters of one shape have each other's",
    bug="S10 pytorch/torchtitan #3356: flat order of groups is not that of named_parameters",
    case="fsdp_4_to_hsdp_2x2",
    caught_by="resume gradients",
    named="optimizer state lost",
)
@partial(op.after_call, LOAD)
def moments_of_two_parameters_exchanged(state: State, **_: Any) -> None:
    """Exchange both moments of wq and wo of layer 0 in the loaded state."""
    for moment in ("exp_avg", "exp_avg_sq"):
        first = state["optimizer"][f"state.layers.0.attention.wq.weight.{moment}"]
        second = state["optimizer"][f"state.layers.0.attention.wo.weight.{moment}"]
        old_first = first.clone()
        first.copy_(second)
        second.copy_(old_first)


@fault(
    breaks="moments are restored and AdamW's step counter is not, so that bias correction begins again",
    bug="S11 Megatron-LM #5976: the counter of a step that was made up to create the state",
    case="hsdp_2x2_to_ddp_2",
    caught_by="resume update",
    named="optimizer state lost",
)
@partial(op.after_call, LOAD)
def step_counter_lost(state: State, **_: Any) -> None:
    """Set the optimizer's step counters in the loaded state to zero."""
    for key, value in state["optimizer"].items():
        if key.startswith("state.") and key.endswith(".step"):
            value.zero_()


schedule_starts_anew = fault(
    breaks="the scheduler is not restored, and begins with the warm-up again",
    bug="S01 pytorch/torchtitan #275: LR scheduler not in the checkpoint; S06: the rate lives in the optimizer as well",
    case="fsdp_4_to_fsdp_4",
    caught_by="resume update",
    named="schedule starts anew",
    does=op.skip_call(".checkpoint:continue_schedule"),
)
older_checkpoint_read = fault(
    breaks="checkpoints are put in order as text or by age, and an older one is read",
    bug="S07 deepspeedai/DeepSpeed #5395: step 10 before step 2",
    case="twice_through_three_layouts",
    caught_by="completed resume samples",
    named="resumed elsewhere",
    does=op.instead(
        ".checkpoint:latest",
        lambda original, folder: min(folder.glob("step_*")),
        when=lambda folder: len(list(folder.glob("step_*"))) > 1,
    ),
)


# ---- what is written while training goes on

ASYNC = "torch.distributed.checkpoint:async_save"
STEP = ".trainer:Trainer.train_step"


class _Later:
    """The future of a checkpoint. Its `result` writes all checkpoints that are not written yet."""

    unwritten: list[Callable[[], Any]] = []

    def result(self) -> None:
        while self.unwritten:
            self.unwritten.pop(0)()


def _write_after_the_next_step(shared: Callable[[str], bool]) -> op.Operator:
    """Return the operator that writes an asynchronous checkpoint only after the next step.

    shared: whether a key of the state is not copied: then the checkpoint has the values of the next step. Others are
    copied.
    """

    def begin(original: Any, state: State, *, checkpoint_id: Any, **_: Any) -> _Later:
        """Copy the state, but for what is shared, and return a future without writing anything."""
        import copy

        from torch.distributed.checkpoint import save

        parts = {}
        for kind in ("model", "optimizer"):
            parts[kind] = {key: value if shared(key) else copy.deepcopy(value) for key, value in state[kind].items()}
        _Later.unwritten.append(lambda: save(state | parts, checkpoint_id=checkpoint_id))
        return _Later()

    def finish(*_: Any, **__: Any) -> None:
        _Later().result()

    return op.together(op.instead(ASYNC, begin), op.after_call(STEP, finish))


half_of_an_async_save_not_copied = fault(
    breaks="a checkpoint that is written in the background shares the last layer's tensors with training: it is torn",
    bug="of the family of S05, torn asynchronous saves: staging without a copy, so that a checkpoint holds two steps",
    case="fsdp_2_async_to_fsdp_2",
    caught_by="resume loss gradients",
    named="parameters changed over the checkpoint",
    does=_write_after_the_next_step(lambda key: "layers.1." in key),
)
async_save_of_the_next_step = fault(
    breaks="a checkpoint that is written in the background is overwritten by the state of the next step",
    bug="of the family of S05, torn asynchronous saves: the save of step k ends after step k + 1 has begun",
    case="fsdp_2_async_to_fsdp_2",
    caught_by="resume loss gradients",
    named="resumed elsewhere",
    does=_write_after_the_next_step(lambda key: True),
)
moments_of_an_async_save_not_copied = fault(
    breaks="a checkpoint that is written in the background has the parameters of its step, and moments of the next one",
    bug="of the family of S05, torn asynchronous saves: the optimizer's state is staged by reference",
    case="fsdp_2_async_to_fsdp_2",
    caught_by="resume gradients update",
    named="optimizer state lost",
    does=_write_after_the_next_step(lambda key: key.startswith("state.")),
)
latest_is_the_one_being_written = fault(
    breaks="the name of the latest checkpoint is noted before its data are written, and a crash comes between",
    bug="of the family of S05, torn asynchronous saves: `latest` points to a checkpoint that was never finished",
    case="ddp_2_cut_short_to_fsdp_2",
    caught_by="completed",
    named="a process failed",
    does=op.instead(".checkpoint:latest", lambda original, folder: max(folder.glob("step_*"))),
)


@fault(
    breaks="the older checkpoint is deleted before the newer one is written, and a crash comes between",
    bug="of the family of S05, torn asynchronous saves: a crash in the middle loses the last good checkpoint",
    case="ddp_2_cut_short_to_fsdp_2",
    caught_by="completed",
    named="a process failed",
)
@partial(op.before_call, ASYNC)
def last_good_checkpoint_deleted_first(*_: Any, checkpoint_id: Any, **__: Any) -> None:
    """Delete all older checkpoints, on rank 0, before an asynchronous save begins."""
    import shutil

    for older in checkpoint_id.parent.glob("step_*"):
        if op.this_rank() == 0 and older != checkpoint_id:
            shutil.rmtree(older)


# ---- what is written

_initial: State = {}


def _keep_initial_parameters(model: Any) -> Any:
    """Copy the parameters of a model that was just built, and return the model."""
    from harness.core.trainers.llama3.checkpoint import get_model_state_dict

    _initial.update({fqn: value.clone() for fqn, value in get_model_state_dict(model).items()})
    return model


initial_parameters_saved = fault(
    breaks="the state dict is made once and kept, so the checkpoint holds the initial parameters",
    bug="S05 pytorch/torchtitan #3675, #1226, #977: stale weights are saved, training itself is right",
    case="fsdp_4_to_single",
    caught_by="resume loss gradients",
    named="resumed elsewhere",
    does=op.together(
        op.change_result(".trainer:build_model", _keep_initial_parameters),
        op.before_call(SAVE, lambda state, **_: state.update(model=_initial)),
    ),
)


@fault(
    breaks="gradients are saved, too, one more tensor of each parameter",
    bug="of the family of S05: a state dict that is made of whatever the trainer has",
    case="fsdp_2_trained_on_to_fsdp_2",
    caught_by="checkpoint",
    named="checkpoint",
)
@partial(op.instead, ".checkpoint:state_of")
def gradients_saved_besides(original: Any, parts: Any, counters: Any) -> State:
    """Return the state of a checkpoint with all gradients in it, if there are any."""
    gradients = {}
    for part in parts:
        for fqn, parameter in part.model.named_parameters():
            if parameter.grad is not None:
                gradients[fqn] = parameter.grad
    return original(parts, counters) | ({"gradients": gradients} if gradients else {})


@fault(
    breaks="optimizer state is saved in bfloat16, which halves a checkpoint and rounds what is resumed",
    bug="of the family of S05: what is saved is not what trains",
    case="fsdp_4_to_hsdp_2x2",
    caught_by="checkpoint resume",
    named="checkpoint",
)
@partial(op.before_call, SAVE)
def optimizer_state_saved_in_bfloat16(state: State, **_: Any) -> None:
    """Cast the tensors of the optimizer's state to bfloat16 before saving. Scalars stay."""
    import torch

    for key, value in state["optimizer"].items():
        if torch.is_tensor(value) and value.dim():
            state["optimizer"][key] = value.bfloat16()


def _is_strided(value: Any) -> bool:
    return any("Strided" in type(placement).__name__ for placement in value.placements)


@fault(
    breaks="shards of a dim that tp and FSDP both cut are saved in the mesh's order, so rows change places",
    bug="S08 FSDP with TP: strided sharding lost on the way to a full tensor",
    case="fsdp_2_tp_2_to_tp_4",
    caught_by="resume loss gradients",
    named="slices mixed",
)
@partial(op.before_call, SAVE, when=lambda state, **_: any(map(_is_strided, state["model"].values())))
def strided_shards_saved_in_mesh_order(state: State, **_: Any) -> None:
    """Replace strided placements in the state by plain shards of dim 0 before saving, without moving data."""
    from torch.distributed.tensor import DTensor, Shard

    for fqn, value in state["model"].items():
        if _is_strided(value):
            plain = [Shard(0)] * len(value.placements)
            state["model"][fqn] = DTensor.from_local(value.to_local(), value.device_mesh, plain)
