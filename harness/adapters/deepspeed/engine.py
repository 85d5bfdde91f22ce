"""The trainer of one rank: DeepSpeed's engine, and the documented loop around it: forward, `backward`, `step` each
microbatch.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from harness.adapters.deepspeed import BUCKET, cpu
from harness.adapters.deepspeed.seams import note_engine
from harness.core.case.case import Case
from harness.core.case.features import ZERO
from harness.core.probe.values import note_update
from harness.core.trainers import Metrics, StartedTrainer
from harness.core.trainers.support import process_group
from harness.core.trainers.support.samples import rank_samples
from harness.core.trainers.support.weights import read_weights
from harness.reference.data import build_dataset
from harness.reference.model import llama_from
from harness.reference.train import lr_factor


class Started(StartedTrainer):
    """The started trainer of one rank, with DeepSpeed's engine around the reference's model.

    `reports` is only the loss without ZeRO: DeepSpeed does not show the norm by which it then clips.
    """

    def __init__(self, case: Case, weights: Path | None, device: str, *, offload: bool = False) -> None:
        self.case = case
        self.device = device
        self.metrics = []
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        os.environ.setdefault("LOCAL_RANK", str(self.rank))
        dtype = getattr(torch, case.training.dtype)
        if device == "cpu":
            cpu.choose_cpu()
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        if device == "cpu":
            cpu.stub_shared_memory()
        process_group.join(process_group.backend_for(device))
        deepspeed.init_distributed(dist_init_required=False, auto_mpi_discovery=False)
        model = llama_from(dict(read_weights(weights, case)), config=case.model, dtype=dtype).to(device)
        self.dataset = build_dataset(case.training, case.model)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=_optimizer(case, model), config=configuration(case, offload=offload)
        )
        self.model_parts = [self.engine]
        if note_engine(self.engine) == 0:
            self.reports = ("loss",)  # the norm by which torch's gradients are clipped it does not show

    def train(self, last_step: int) -> None:
        for step in range(len(self.metrics) + 1, last_step + 1):
            self.metrics.append(self.step(step))

    def step(self, step: int) -> Metrics:
        """Train one step of `accumulation` microbatches.

        Return its metrics: loss over all ranks' valid tokens, norm and rate.
        """
        recipe = self.case.training
        passes = self.case.features.accumulation
        tokens, labels = (
            part.to(self.device) for part in rank_samples(self.case, self.dataset, step, self.rank, self.world_size)
        )
        valid = (labels != -100).sum()
        dist.all_reduce(valid)
        rate = recipe.lr * lr_factor(step, recipe)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        shown = torch.zeros((), dtype=getattr(torch, recipe.dtype), device=self.device)
        for inputs, targets in zip(tokens.chunk(passes), labels.chunk(passes), strict=True):
            total = cross_entropy(self.engine(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
            self.engine.backward(total * self.world_size * passes / valid)  # it averages over ranks and microbatches
            self.engine.step()
            shown += total.detach()
        note_update()
        dist.all_reduce(shown)
        norm = self.engine.get_global_grad_norm()
        return Metrics(step, float(shown / valid), None if norm is None else float(norm), rate)


def _optimizer(case: Case, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return torch's optimizer for the recipe. If only matrices decay, vectors are a second group without weight decay."""
    recipe = case.training
    matrices = [p for p in model.parameters() if p.dim() > 1 or recipe.decay == "all"]
    others = [p for p in model.parameters() if p.dim() == 1 and recipe.decay == "matrices"]
    groups = [{"params": matrices}, *([{"params": others, "weight_decay": 0.0}] if others else [])]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, recipe.lr, weight_decay=recipe.weight_decay)
    return torch.optim.AdamW(groups, recipe.lr, (recipe.beta1, recipe.beta2), recipe.eps, recipe.weight_decay)


def configuration(case: Case, *, offload: bool = False) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a case: its defaults but for sizes.

    With its default sizes ZeRO-3 would gather what is small beside 1e9 elements once and keep it.
    """
    stage = ZERO.index(case.wrapper) + 1 if case.wrapper in ZERO else 0
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 0}
    zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    if offload:
        zero |= {"offload_optimizer": {"device": "cpu"}}
    return {
        "train_micro_batch_size_per_gpu": case.local_batch,
        "gradient_accumulation_steps": case.features.accumulation,
        "gradient_clipping": case.training.max_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
