"""What is in memory as a model's forward pass ends, of units whose own pass is over."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from harness.core.probe.resharding import measure_after_forward
from harness.core.probe.structure import fsdp2_switches, wrapper_evidence


def test_a_unit_of_which_a_module_has_yet_to_run_is_not_looked_at() -> None:
    """A loss applies the output itself, and a torch that does not end the unit's pass for it leaves it gathered."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4, bias=False))
    unit = SimpleNamespace(
        _module_info=SimpleNamespace(module=model[1], param_name="weight"),
        _sharded_param_data=model[1].weight.detach()[:2],
        all_gather_outputs=[torch.zeros(12)],
        _orig_size=torch.Size((4, 3)),
    )
    group = SimpleNamespace(fsdp_params=[unit], _training_state=SimpleNamespace(name="FORWARD"))
    model[1]._get_fsdp_state = lambda: SimpleNamespace(_fsdp_param_group=group)
    assert set(measure_after_forward(model, finished_only=True).bytes) == {"0.weight", "0.bias"}
    group._training_state.name = "IDLE"
    assert measure_after_forward(model, finished_only=True).bytes["1.weight"] == 48


def test_a_unit_that_is_told_not_to_be_gathered_in_backward_claims_so() -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2))
    for module, gathers in zip(model, (False, True), strict=True):
        told = {"mesh_info": None, "post_forward_mesh_info": None, "fsdp_params": [], "unshard_in_backward": gathers}
        state = SimpleNamespace(_fsdp_param_group=SimpleNamespace(**told))
        module._get_fsdp_state = lambda state=state: state
    assert {name: unit.backward_gathers for name, unit in wrapper_evidence([model]).items()} == {"0": False, "1": True}


def test_what_fsdp2_was_told_otherwise_than_usual_is_seen_in_each_module_and_in_the_root() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    usual = {"output_dtype": None, "cast_forward_inputs": True}
    states = {}
    for module in (*model, model):
        states[module] = SimpleNamespace(
            _mp_policy=SimpleNamespace(**usual),
            _state_ctx=SimpleNamespace(post_optim_event=None),
            _fsdp_param_group=SimpleNamespace(fsdp_params=[]) if module is not model else None,
            _fsdp_param_groups=(),
            _modules=(module,),
            _states_to_forward_prefetch=[],
            _states_to_backward_prefetch=[],
        )
        module._get_fsdp_state = lambda state=states[module]: state
    assert fsdp2_switches([model]) == {}
    first, second, root = (states[module] for module in (*model, model))
    first._fsdp_param_group = SimpleNamespace(fsdp_params=[SimpleNamespace(pin_memory=True)], unshard_in_backward=False)
    first._states_to_forward_prefetch, second._mp_policy.cast_forward_inputs = [second], False
    root._state_ctx.post_optim_event, root._mp_policy.output_dtype = object(), torch.float32
    assert fsdp2_switches([model]) == {
        "": ("output_dtype float32", "post_optim_event"),
        "0": ("unshard_in_backward off", "offload to pinned memory", "forward prefetch of 1"),
        "1": ("cast_forward_inputs off",),
    }
