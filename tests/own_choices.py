"""Changes to the llama3 trainer that real trainers make by choice. None makes a number wrong.

`harness run fsdp_2 --fault tests/own_choices.py:compiled_product`
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from harness.faults import Fault, fault
from harness.faults import operators as op


def choice(does: Any) -> Fault:
    return fault(breaks="nothing", bug="none", case="fsdp_2", caught_by="features", named="unknown", does=does)


_made: list[Any] = []


def _compiled(original: Any, self: Any, x: Any) -> Any:
    import torch
    import torch.nn.functional as F

    if not _made:
        _made.append(torch.compile(lambda a, b: F.silu(a) * b, backend="eager"))
    return self.w2(_made[0](self.w1(x), self.w3(x)))


compiled_product = choice(op.instead("harness.reference.model:FeedForward.forward", _compiled))


def _on_the_host(original: Any, model: Any, part: Any) -> Any:
    import torch

    with torch.autograd.graph.save_on_cpu():
        return original(model, part)


saved_on_the_host = choice(op.instead(".trainer:loss_of", _on_the_host))


def _sent_to_peers(original: Any, tokens: Any, labels: Any, mesh: Any, case: Any) -> Any:
    import torch
    import torch.distributed as dist

    group, both = mesh.get_group("tp"), torch.stack([tokens, labels])
    dist.broadcast(both, src=dist.get_global_rank(group, 0), group=group)
    return original(both[0], both[1], mesh, case)


batch_sent_to_peers = choice(op.instead(".trainer:sequence_part", _sent_to_peers))


_optimizers: list[Any] = []


def _noted(original: Any, *args: Any, **rest: Any) -> Any:
    _optimizers.append(original(*args, **rest))
    return _optimizers[-1]


def _clip_the_optimizers(original: Any, parameters: Any, *rest: Any, **more: Any) -> Any:
    return original([p for o in _optimizers for group in o.param_groups for p in group["params"]], *rest, **more)


def _stay_gathered(model: Any, *_: Any) -> None:
    model.set_reshard_after_backward(False)


def _free(trainer: Any) -> None:
    for part in trainer.model_parts:
        for module in part.modules():
            if hasattr(module, "reshard"):
                module.reshard()


gathered_until_freed_by_hand = choice(
    op.together(
        op.after_call(".parallelize:apply_fsdp", _stay_gathered),
        op.instead(".recipe:build_optimizer", _noted),
        op.instead(".clip:clip_gradients", _clip_the_optimizers),
        op.after_call(".trainer:Trainer.optimizer_step", _free),
    )
)


def _saves(original: Any, self: Any) -> Any:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    found = original(self)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        whole = get_model_state_dict(self.model_parts[0], options=StateDictOptions(full_state_dict=True))
        assert dist.get_rank() or len(whole) > 1
        dcp.save({"model": get_model_state_dict(self.model_parts[0])}, checkpoint_id=Path(folder[0]) / "saved")
        dist.barrier()
    return found


saves_in_each_step = choice(op.instead(".trainer:Trainer.optimizer_step", _saves))
