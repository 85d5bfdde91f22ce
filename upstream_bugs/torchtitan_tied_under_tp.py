"""torchtitan 0.3.0 gathers and reduces a tied embedding twice under FSDP x tensor parallel, and keeps two of its gradients.

Its models tie tok_embeddings.weight to lm_head.weight as they are built. Tensor parallel then makes each a separate parameter,
FSDP2 notes two of them, and `init_states` ties them again. So two entries of FSDP2 are one tensor. It is gathered, and its
gradient reduced, for each entry; the two gradients add up to the right one. Without tensor parallel it is one entry.

torchrun --nproc-per-node 4 upstream_bugs/torchtitan_tied_under_tp.py     exits with 1 while it is so
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan_accumulation_reduces_every_microbatch import configured


def main() -> int:
    """The argument is the tensor parallel degree, 2 if there is none."""
    config = configured()
    config.model_spec.model.enable_weight_tying = True
    config.parallelism.tensor_parallel_degree = int(sys.argv[1]) if sys.argv[1:] else 2
    trainer = config.build()
    (model,) = trainer.model_parts
    assert model.tok_embeddings.weight is model.lm_head.weight
    trainer.step = 1
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    states = {module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)}
    entries = [entry for state in states for group in state._fsdp_param_groups for entry in group.fsdp_params]
    of_tied = [entry for entry in entries if entry.sharded_param is model.lm_head.weight]
    if dist.get_rank() == 0:
        parameters = len(list(model.parameters()))
        print(f"{parameters} parameters, FSDP2 gathers {len(entries)}, the tied one {len(of_tied)} times")
    dist.destroy_process_group()
    return int(len(of_tied) > 1)


if __name__ == "__main__":
    sys.exit(main())
