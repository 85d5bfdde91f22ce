"""What is in memory as a model's forward pass ends, of units whose own pass is over."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from harness.probe.resharding import after_forward


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
    assert set(after_forward(model, over=True).bytes) == {"0.weight", "0.bias"}
    group._training_state.name = "IDLE"
    assert after_forward(model, over=True).bytes["1.weight"] == 48
