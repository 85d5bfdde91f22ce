"""A patch of torch's LambdaLR to the recipe's learning rates, for a trainer that has no such schedule."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from harness.core.case.case import Case
from harness.reference.train import lr_factor


def follow_recipe(case: Case) -> None:
    """Patch LambdaLR: every one made from now on has the recipe's factors, whatever function it gets."""
    original = LambdaLR.__init__

    def with_recipe(self: LambdaLR, optimizer: Any, lr_lambda: Any, *args: Any, **kwargs: Any) -> None:
        original(self, optimizer, lambda finished: lr_factor(finished + 1, case.training), *args, **kwargs)

    LambdaLR.__init__ = with_recipe
