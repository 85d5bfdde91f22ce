"""A trainer that is llama3, but for how first and last stage add up the gradients of a tied embedding: each sends its own.

`harness run pp_4_tied --trainer tests/tied_by_send.py`
"""

from __future__ import annotations

import dataclasses
from typing import Any

from harness.core.case.case import Case
from harness.core.case.traits import TrainerTraits
from harness.core.trainers.llama3 import Llama3


class BySend(Llama3):
    def traits(self, case: Case) -> TrainerTraits:
        return dataclasses.replace(super().traits(case), tied_reduces_by="send")

    def start(self, case: Case, weights: Any, device: str) -> Any:
        from harness.core.trainers.llama3 import tied

        tied.group_of_ends, tied.sum_gradients = _whole_pipeline, _exchange
        return super().start(case, weights, device)


def _whole_pipeline(case: Case, mesh: Any) -> Any:
    """No group of two ranks is made. Ranks in the middle have no copy."""
    at = mesh.get_local_rank("pp")
    return mesh.get_group("pp") if at in (0, case.dims.pp - 1) else None


def _exchange(parts: Any, group: Any) -> None:
    import torch
    import torch.distributed as dist

    from harness.core.trainers.llama3 import clip, tied

    for gradient in clip.local_gradients(tied.weights(parts)) if group is not None else ():
        ranks, other = dist.get_process_group_ranks(group), torch.empty_like(gradient)
        peer = ranks[-1] if dist.get_rank(group) == 0 else ranks[0]
        sent = dist.isend(gradient.clone(), peer, group=group)
        dist.recv(other, peer, group=group)
        sent.wait()
        gradient.add_(other)


adapter = BySend()
