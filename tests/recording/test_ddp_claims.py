"""What DDP says of itself to whoever looks at it from outside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from harness.core.probe.structure import wrapper_evidence


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_communication_hook_is_seen_however_it_is_registered() -> None:
    plain, hooked, built_in = (DistributedDataParallel(nn.Linear(2, 2)) for _ in range(3))
    hooked.register_comm_hook(None, fp16_compress_hook)
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    told = [wrapper_evidence([model])[""].comm_hook for model in (plain, hooked, built_in)]
    assert told == ["", "fp16_compress_hook", "BuiltinCommHookType.FP16_COMPRESS"]


def test_parameters_that_ddp_was_told_to_ignore_are_seen_and_those_that_it_reduces_late_are_not_among_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    names = [name for name, _ in model.named_parameters() if name.startswith("1.0.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    late = [("0.weight", model[0].weight)]
    wrapped = DistributedDataParallel(
        model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=model[1][1].weight
    )
    outer = nn.Sequential(wrapped, nn.Linear(2, 2))
    assert wrapper_evidence([outer])["0"].ignored == ("0.1.0.weight", "0.1.0.bias")
