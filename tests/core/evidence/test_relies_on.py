"""What the probe relies on of torch is there, and told where it is not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining

from harness.core.case.releases import untested_text
from harness.core.evidence import relies_on


def test_this_torch_has_all_of_it() -> None:
    assert relies_on.lacking_for_probe() == relies_on.lacking_for_recorder() == ""


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch._C, "_current_graph_task_id"),
        (torch.distributed.distributed_c10d, "_resolve_process_group"),
        (torch.distributed.fsdp._fully_shard._fsdp_state, "FSDPState"),
        (torch.autograd, "_engine_run_backward"),
    ],
)
def test_a_name_that_is_gone_is_told_by_what_it_is_for(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    monkeypatch.delattr(owner, name)
    told = relies_on.lacking_for_probe()
    (needed,) = [known for known in (relies_on.TORCH_NAMES | relies_on.PROBE_ALONE) if known.endswith(name)]
    assert needed in told
    assert (needed in relies_on.lacking_for_recorder()) is (needed in relies_on.TORCH_NAMES)


@pytest.mark.parametrize(
    ("release", "is_new"),
    [
        ("2.13.0+cpu", False),
        ("2.11", False),
        ("2.15.1", False),
        ("2.10.0", True),
        ("2.17.0.dev20261101", True),
        ("", False),
    ],
)
def test_a_release_that_nobody_tried_is_told(release: str, is_new: bool) -> None:
    assert bool(untested_text(release)) is is_new
