"""torchtitan with its default backend trains on old rows of a tied embedding that the data ranks do not divide evenly.

Since #4085 (2026-08-18) spmd_types distributes each parameter separately, after the weights were tied. FSDP2 then notes two
entries, and `init_states` ties them again. Where the rows do not divide, each entry pads its slice into separate memory. The
optimizer changes the slice of one entry; the other one goes on gathering what its memory held at the start.

torchrun --nproc-per-node 2 upstream_bugs/torchtitan_tied_stale.py [ROWS]     exits with 1 while it is so (torch 2.15)
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import titan_on_cpu  # noqa: F401
import torch
import torch.distributed as dist
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.models.llama3.config_registry import llama3_debugmodel

init = dist.init_process_group
dist.init_process_group = lambda *_, **__: init("gloo")


class Nothing:
    """Stands in a configuration for a data loader or a tokenizer that is never asked."""

    def build(self, **_: Any) -> Any:
        return self

    def to_dict(self) -> dict[str, Any]:
        return {}


def main() -> int:
    rows = int(sys.argv[1]) if sys.argv[1:] else 2049
    config = llama3_debugmodel()
    sizes = config.model_spec.model
    sizes.enable_weight_tying, sizes.vocab_size = True, rows
    sizes.tok_embeddings.num_embeddings, sizes.lm_head.out_features = rows, rows
    config.loss = CrossEntropyLoss.Config(global_vocab_size=rows)
    config.dataloader, config.tokenizer, config.activation_checkpoint = Nothing(), Nothing(), None
    config.dump_folder = tempfile.gettempdir()
    config.checkpoint.enable = config.validator.enable = config.debug.enable_structured_logging = False
    config.training.mixed_precision_param = config.training.mixed_precision_reduce = "float32"
    config.training.disable_cuda_graphs, config.comm.trace_buf_size = True, 0
    (model,) = config.build().model_parts
    model.tok_embeddings.unshard()
    model.tok_embeddings.reshard()  # as in a first step
    with torch.no_grad():
        model.tok_embeddings.weight.to_local().add_(1.0)  # as an optimizer does
        wanted = model.tok_embeddings.weight.full_tensor()
        model.tok_embeddings.unshard()
        gathered = {
            name: module.weight.detach()
            for name, module in (("embedding", model.tok_embeddings), ("output", model.lm_head))
        }
        wrong = {name: int((value[: len(wanted)] != wanted).any(1).sum()) for name, value in gathered.items()}
    if dist.get_rank() == 0:
        print(f"of {rows} rows that the optimizer changed, forward uses old ones: {wrong}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
