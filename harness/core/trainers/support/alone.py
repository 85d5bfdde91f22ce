"""Features that do not run on tensors without memory, with which a rank that runs alone computes."""

from __future__ import annotations

from collections.abc import Iterator

from harness.core.case.case import Case


def needs_memory(case: Case) -> Iterator[str]:
    """Yield why a case does not run on tensors without memory, one sentence each; nothing if it does.

    `case.wrapper` is the trainer's own, where the case leaves it open.
    """
    if case.wrapper in ("ddp", "replicate"):
        yield f"wrapper {case.wrapper}: DDP's reducer lays gradients into buckets by their addresses"
    if case.wrapper == "fsdp1":
        yield "wrapper fsdp1: it exchanges the contents of parameters for parts of one vector"
    if case.features.compile:
        yield "compile: torch.compile makes code for real tensors only"
    if case.training.quantize:
        yield f"quantize {case.training.quantize}: scales are read from the numbers in a tensor"
    if case.resume:
        yield "resume: a checkpoint is contents"
