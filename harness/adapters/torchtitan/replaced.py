"""The parts of torchtitan that do not run as its users run them, and what runs instead: printed with every verdict.

The case's own model sizes, samples, seed weights and learning rates are not among them: those are handed over as data.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.adapters.torchtitan.eras import MAIN_FUNCTION, TRAINER_CONFIG
from harness.adapters.torchtitan.source import (
    Source,
    chunks_of,
    reason_loss_is_whole,
    why_not_largest,
    why_not_spmd_types,
)
from harness.core.case.case import Case


def replaced_parts(case: Case, source: Source, device: str) -> Iterator[str]:
    """Yield a phrase for each part that is replaced, "part: what by what (why)". Nothing for a part that runs as usual."""
    era = source.era
    if era.chunks_loss and chunks_of(case, era) == 1:
        yield f"loss: chunked cross entropy by whole cross entropy ({reason_loss_is_whole(case, era)})"
    if era.run_by == TRAINER_CONFIG.run_by:
        yield from _replaced_by_configurations(case, source, device)
    if why := why_not_largest(case, era):
        yield f"the largest loss that it reports: not judged ({why})"
    for name, value in source.options.items():
        yield f"{name}: {'as it comes' if value is None else value!r}, requested by the trainer's file"
    if case.training.dtype == "float64":
        yield "casts: those to float32 leave float64 as it is (a float64 recipe)"
    if device == "cpu":
        yield from _on_cpu(source)


def _replaced_by_configurations(case: Case, source: Source, device: str) -> Iterator[str]:
    """Yield what is replaced in torchtitan that is run by configurations: attention, torch's SGD and spmd_backend."""
    if source.era.masks(case) and device == "cpu":
        yield "attention: FlexAttention by SDPA with the same mask (no backward on CPU)"
    elif not source.era.masks(case):
        yield "attention: SDPA, whose samples lie each in a row of their own"
    if case.training.optimizer == "sgd":
        yield "optimizer: torch's SGD, which a subclass of its container adds (it names Adam, AdamW and DistMuon)"
    if source.era.fed_microbatches and (why := why_not_spmd_types(case, source.spmd_backend, source.era)):
        yield f"spmd_backend: spmd_types by partial_dtensor ({why})"


def _on_cpu(source: Source) -> Iterator[str]:
    """Yield what is replaced on CPU: communication, and in early versions the device."""
    yield "communication: NCCL by gloo; averages are sums, then divided"
    if source.era.run_by == MAIN_FUNCTION.run_by:
        yield "device: cuda is read as cpu in its sources"
