"""The trainer of own_trainer.py with what is ordinary elsewhere: it casts its model to float32, whatever the recipe's dtype.

`harness matrix --dtype float32 --trainer tests/own_float32_trainer.py -k ddp`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from harness.adapters.support.requests import beyond
from harness.core.case.case import Case
from harness.core.trainers import StartedTrainer

sys.path.append(os.path.dirname(__file__))

from own_trainer import Own, Started

KNOWN = """dtype seed steps global_batch seq_len optimizer lr eps beta1 beta2 weight_decay max_norm warmup_steps
final_lr_fraction masked_samples all_valid dp_replicate accumulation name dim n_layers vocab_size ffn_dim rope_scaling"""


class OwnInFloat32(Own):
    name = "own_float32"
    dtypes = ("float32",)

    def unsupported(self, case: Case) -> str | None:
        return next(beyond(case, dict.fromkeys(KNOWN.split(), ...) | {"wrapper": ("ddp",)}, self.name), None)

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        return InFloat32(case, weights)


class InFloat32(Started):
    def __init__(self, case: Case, weights: Path | None) -> None:
        import torch

        super().__init__(case, weights)
        recipe = case.training
        options = {"lr": recipe.lr, "eps": recipe.eps, "weight_decay": recipe.weight_decay, "foreach": False}
        betas = (recipe.beta1, recipe.beta2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=betas, **options)

    def wrapped(self, model: Any) -> Any:
        return super().wrapped(model.float())


adapter = OwnInFloat32()
