"""Hooks on tensors that autograd saves for backward, by their owner."""

from __future__ import annotations

from harness.core.evidence.step import StepEvidence
from harness.core.judge.explained import allowed_hooks
from harness.core.judge.trial import Trial

SAVED_TENSOR_HOOKS = "hooks on tensors saved for backward"
EXEMPT_HOOK_MODULES = ("torch.utils.checkpoint", "torch._functorch", "torch._dynamo", "torch._inductor")
"""Recomputation's are judged by what is recomputed; a compiler's are there while it traces."""


def saved_tensor_hook_owners(step: StepEvidence) -> set[str]:
    """Return the owners ("module.function") of hooks that a step put on tensors saved for backward.

    Hooks of EXEMPT_HOOK_MODULES are left out. Empty if there are no others.
    """
    return {
        f"{hook.module}.{hook.owner}" for hook in step.activity.saved if not hook.module.startswith(EXEMPT_HOOK_MODULES)
    }


def foreign_hook_owners(trial: Trial, step: StepEvidence) -> list[str]:
    """Return the owners of a step's hooks on saved tensors that no allowance names, sorted.

    Hooks of EXEMPT_HOOK_MODULES are left out.
    """
    return sorted(saved_tensor_hook_owners(step) - allowed_hooks(trial))
