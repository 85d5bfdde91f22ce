"""Mistakes in what a checkpoint holds, and in what is read back from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.faults import Fired, fault, replace

State = dict[str, Any]


def around_load(change: Callable[[Callable[[], None], State], None]) -> None:
    """torch.distributed.checkpoint.load fills a state dict in place; change(load, state) runs instead."""
    import torch.distributed.checkpoint as dcp

    def make(original: Any) -> Any:
        def load(state: State, *args: Any, **kwargs: Any) -> None:
            change(lambda: original(state, *args, **kwargs), state)

        return load

    replace(dcp, "load", make)


def before_save(change: Callable[[State], None]) -> None:
    import torch.distributed.checkpoint as dcp

    def make(original: Any) -> Any:
        def save(state: State, *args: Any, **kwargs: Any) -> Any:
            change(state)
            return original(state, *args, **kwargs)

        return save

    replace(dcp, "save", make)


@fault(
    breaks="the optimizer's state is not read from the checkpoint",
    bug="S01 pytorch/torchtitan #275: an item of the state has no effect after resuming",
    case="fsdp_4_to_hsdp_2x2",
    caught_by="resume update gradients",
    named="resumed without optimizer state: exp_avg and exp_avg_sq are zero in every parameter",
)
def optimizer_state_not_restored(fired: Fired) -> None:
    def change(load: Callable[[], None], state: State) -> None:
        fresh = state.pop("optimizer")
        fired()
        load()
        state["optimizer"] = fresh

    around_load(change)


@fault(
    breaks="the scheduler is not restored, and begins with the warm-up again",
    bug="S01 pytorch/torchtitan #275: LR scheduler not in the checkpoint; S06: the rate lives in the optimizer as well",
    case="fsdp_4_to_fsdp_4",
    caught_by="resume update",
    named="the schedule starts anew after resuming: the learning rate of step 4 is that of step 2",
)
def schedule_starts_anew(fired: Fired) -> None:
    from harness.trainers.llama3 import checkpoint

    def make(_: Any) -> Any:
        def skipped(scheduler: Any, finished: int) -> None:
            fired()

        return skipped

    replace(checkpoint, "continue_schedule", make)


@fault(
    breaks="the data loader begins its epoch again",
    bug="S01 pytorch/torchtitan #275: an item of the state has no effect after resuming",
    case="ddp_4_to_fsdp_2",
    caught_by="resume samples loss gradients",
    named="the data position starts anew after resuming: step 3 receives the samples of step 1",
)
def data_position_starts_anew(fired: Fired) -> None:
    def change(load: Callable[[], None], state: State) -> None:
        load()
        fired()
        state["samples"] = 0

    around_load(change)


@fault(
    breaks="a key that is not requested of the checkpoint stays as it was, and nobody is strict about it",
    bug="S05, S14: partial loads (strict=False) leave a parameter at its initial value",
    case="tp_2_to_fsdp_2",
    caught_by="resume loss gradients",
    named="layers.1.attention.wq.weight was not loaded from the checkpoint: still the seed's values",
)
def one_parameter_not_loaded(fired: Fired) -> None:
    def change(load: Callable[[], None], state: State) -> None:
        left_out = state["model"].pop("layers.1.attention.wq.weight")
        fired()
        load()
        state["model"]["layers.1.attention.wq.weight"] = left_out

    around_load(change)


@fault(
    breaks="optimizer state is matched by position, so two parameters of one shape have each other's",
    bug="S10 pytorch/torchtitan #3356: flat order of groups is not that of named_parameters",
    case="fsdp_4_to_hsdp_2x2",
    caught_by="resume gradients",
    named="optimizer state is exchanged: layers.0.attention.wq.weight resumed with exp_avg and exp_avg_sq of"
    " layers.0.attention.wo.weight",
)
def moments_of_two_parameters_exchanged(fired: Fired) -> None:
    def change(load: Callable[[], None], state: State) -> None:
        load()
        fired()
        for moment in ("exp_avg", "exp_avg_sq"):
            one, other = (
                state["optimizer"][f"state.layers.0.attention.{name}.weight.{moment}"] for name in ("wq", "wo")
            )
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

    around_load(change)


@fault(
    breaks="moments are restored and AdamW's step counter is not, so that bias correction begins again",
    bug="S11 Megatron-LM #5976: the counter of a step that was made up to create the state",
    case="hsdp_2x2_to_ddp_2",
    caught_by="resume update",
    named="the optimizer's step counter is 0 after resuming, 2 was saved",
)
def step_counter_lost(fired: Fired) -> None:
    def change(load: Callable[[], None], state: State) -> None:
        load()
        fired()
        for key, value in state["optimizer"].items():
            if key.startswith("state.") and key.endswith(".step"):
                value.zero_()

    around_load(change)


@fault(
    breaks="a checkpoint that cannot be used is passed over in silence, and training starts from scratch",
    bug="of the family of S01: a resume that only logs a warning where there is no checkpoint",
    case="fsdp_4_to_fsdp_4",
    caught_by="completed resume samples loss gradients",
    named="the checkpoint of step 2 was ignored: training starts from scratch",
)
def checkpoint_ignored(fired: Fired) -> None:
    from harness.trainers.llama3.trainer import Trainer

    def make(_: Any) -> Any:
        def resume(self: Any, folder: Any) -> None:
            fired()

        return resume

    replace(Trainer, "resume", make)


@fault(
    breaks="checkpoints are put in order as text or by age, and an older one is read",
    bug="S07 deepspeedai/DeepSpeed #5395: step 10 before step 2",
    case="twice_through_three_layouts",
    caught_by="completed resume samples",
    named="resumed from the state after step 1, requested the checkpoint of step 2",
)
def older_checkpoint_read(fired: Fired) -> None:
    from harness.trainers.llama3 import checkpoint

    def make(original: Any) -> Any:
        def oldest(folder: Any) -> Any:
            found = min(folder.glob("step_*"))
            if found != original(folder):
                fired()
            return found

        return oldest

    replace(checkpoint, "latest", make)


@fault(
    breaks="the state dict is made once and kept, so the checkpoint holds the initial parameters",
    bug="S05 pytorch/torchtitan #3675, #1226, #977: stale weights are saved, training itself is right",
    case="fsdp_4_to_single",
    caught_by="resume loss gradients",
    named="resumed parameters are the seed's, although the optimizer's state is that of step 2",
)
def initial_parameters_saved(fired: Fired) -> None:
    from harness.trainers.llama3 import checkpoint, trainer

    kept: State = {}

    def make(original: Any) -> Any:
        def build(*args: Any, **kwargs: Any) -> Any:
            model = original(*args, **kwargs)
            state: State = checkpoint.get_model_state_dict(model)
            kept.update({fqn: value.clone() for fqn, value in state.items()})
            return model

        return build

    def change(state: State) -> None:
        fired()
        state["model"] = kept

    replace(trainer, "build_model", make)
    before_save(change)


@fault(
    breaks="gradients are saved besides, one more tensor of each parameter",
    bug="of the family of S05: a state dict that is made of whatever the trainer has",
    case="fsdp_2_trained_on_to_fsdp_2",
    caught_by="checkpoint",
    named="the checkpoint of step 2 holds 2 tensors for one, gradients.* and model.*, in every parameter",
)
def gradients_saved_besides(fired: Fired) -> None:
    from harness.trainers.llama3 import checkpoint

    def make(original: Any) -> Any:
        def state_of(parts: Any, counters: Any) -> State:
            parameters = (named for part in parts for named in part.model.named_parameters())
            named = {fqn: parameter.grad for fqn, parameter in parameters if parameter.grad is not None}
            fired()
            return original(parts, counters) | ({"gradients": named} if named else {})

        return state_of

    replace(checkpoint, "state_of", make)


@fault(
    breaks="optimizer state is saved in bfloat16, which halves a checkpoint and rounds what is resumed",
    bug="of the family of S05: what is saved is not what trains",
    case="fsdp_4_to_hsdp_2x2",
    caught_by="checkpoint resume",
    named="the checkpoint of step 2 holds exp_avg in bfloat16, trained in float64, in every parameter",
)
def optimizer_state_saved_in_bfloat16(fired: Fired) -> None:
    import torch

    def change(state: State) -> None:
        fired()
        for key, value in state["optimizer"].items():
            if torch.is_tensor(value) and value.dim():
                state["optimizer"][key] = value.to(torch.bfloat16)

    before_save(change)


@fault(
    breaks="what is made smaller for a checkpoint is the live weights, which train on rounded to bfloat16",
    bug="of the family of S05: what is saved and what trains are the same tensors, and one is changed for the other",
    case="fsdp_2_trained_on_to_fsdp_2",
    caught_by="update gradients",
    named="weights are changed between steps 2 and 3, where it saves",
)
def saving_rounds_the_live_weights(fired: Fired) -> None:
    import torch

    from harness.trainers.llama3 import checkpoint

    def make(original: Any) -> Any:
        @torch.no_grad()
        def save(parts: Any, counters: Any, folder: Any) -> Any:
            written = original(parts, counters, folder)
            for parameter in (p for part in parts for p in part.model.parameters()):
                fired()
                parameter.copy_(parameter.to(torch.bfloat16))
            return written

        return save

    replace(checkpoint, "save", make)


@fault(
    breaks="the number of the epoch is not restored, so a job that resumes in a later one reads on in the first's order",
    bug="of the family of D08 pytorch/torchtitan #3023: later epochs read in the order of the first, here after a resume",
    case="fsdp_2_to_ddp_2_in_the_second_epoch",
    caught_by="resume samples loss",
    named="the data position is wrong after resuming: step 66 receives the samples of step 2",
)
def later_epoch_resumed_in_the_order_of_the_first(fired: Fired) -> None:
    from harness.trainers.llama3 import data

    def make(original: Any) -> Any:
        def seek(self: Any, samples: int) -> None:
            original(self, samples)
            if samples > len(self.dataset) and samples % len(self.dataset):
                fired()
                self.loader.sampler.set_epoch(0)
                self.iterator = iter(self.loader)

        return seek

    replace(data.Microbatches, "seek", make)


@fault(
    breaks="shards of a dim that tp and FSDP both cut are saved in the mesh's order, so rows change places",
    bug="S08 FSDP with TP: strided sharding lost on the way to a full tensor",
    case="fsdp_2_tp_2_to_tp_4",
    caught_by="resume loss gradients",
    named="rows or columns have changed places",
)
def strided_shards_saved_in_mesh_order(fired: Fired) -> None:
    from torch.distributed.tensor import DTensor, Shard

    def change(state: State) -> None:
        for fqn, value in state["model"].items():
            if any("Strided" in type(placement).__name__ for placement in value.placements):
                fired()
                placements = [Shard(0)] * len(value.placements)
                state["model"][fqn] = DTensor.from_local(value.to_local(), value.device_mesh, placements)

    before_save(change)


@fault(
    breaks="the job is killed before the checkpoint's last file is written",
    bug="of the family of S04: a preemption while saving; without .metadata a checkpoint is incomplete",
    case="fsdp_4_to_fsdp_4",
    caught_by="completed",
    named="no complete checkpoint (step_*/.metadata) to resume from",
)
def checkpoint_incomplete(fired: Fired) -> None:
    from harness.trainers.llama3.trainer import Trainer

    def make(original: Any) -> Any:
        def save(self: Any, folder: Any) -> None:
            fired()
            (original(self, folder) / ".metadata").unlink(missing_ok=True)

        return save

    replace(Trainer, "save", make)


@fault(
    breaks="one rank's file of the checkpoint is lost",
    bug="of the family of S04: a node's disk that is not shared, or was cleaned up",
    case="fsdp_4_to_fsdp_4",
    caught_by="completed",
    named="step_000002: damaged or of another model: FileNotFoundError on rank",
)
def one_file_of_the_checkpoint_lost(fired: Fired) -> None:
    import os

    from harness.trainers.llama3.trainer import Trainer

    def make(original: Any) -> Any:
        def save(self: Any, folder: Any) -> None:
            written = original(self, folder)
            for file in written.glob(f"__{os.environ['RANK']}_*") if os.environ["RANK"] == "1" else ():
                fired()
                file.unlink()

        return save

    replace(Trainer, "save", make)
