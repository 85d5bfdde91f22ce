"""The loss of torchtitan: in chunks or at once, noted once, and said where it is not as its users have it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.core import trainers
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features

FSDP = ParallelDims(dp_shard=4)


def case(dims: ParallelDims = FSDP, **parts: object) -> Case:
    return Case("any", "a test", dims, **parts)  # type: ignore[arg-type]


def test_a_loss_is_noted_once_whoever_computes_it() -> None:
    """torchtitan had a cross entropy of its own for two weeks before it used it."""
    torch = pytest.importorskip("torch")
    from harness.adapters.torchtitan.trainer_config import note_loss_function
    from harness.core.probe.clock import Clock
    from harness.core.probe.samples import SampleRecorder

    def torchs(logits: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    def own(logits: Any, labels: Any) -> Any:
        return -logits.log_softmax(-1).gather(-1, labels[:, None]).sum()

    for compute in (torchs, own):
        recorder, loss = SampleRecorder(Clock()), SimpleNamespace(fn=compute)
        recorder.install()
        try:
            note_loss_function(loss)
            value = loss.fn(torch.eye(4), torch.arange(4))
        finally:
            recorder.remove()
        assert [(part.loss_sum, part.valid_tokens) for part in recorder.microbatches(0)] == [(value.item(), 4)]


@pytest.fixture
def release_in_chunks(release: Path) -> Path:
    """Looks like torchtitan with its loss in chunks, its default since 2026-04-27."""
    (release / "torchtitan" / "components").mkdir()
    (release / "torchtitan" / "components" / "loss.py").write_text("def chunked(num_chunks):\n    lm_head.unshard()\n")
    return release


def test_its_loss_runs_in_the_chunks_that_its_users_run(release_in_chunks: Path) -> None:
    adapter = trainers.load_adapter(f"torchtitan@{release_in_chunks}")
    traits = adapter.traits(case())
    assert (traits.loss_chunks, traits.keeps_loss_unit) == (8, False)
    assert adapter.unsupported(case()) is None
    assert not any(text.startswith("loss:") for text in adapter.replaced(case(), "cpu"))
    (release_in_chunks / "torchtitan" / "components" / "loss.py").write_text("def chunked(num_chunks): ...")
    assert adapter.traits(case()).keeps_loss_unit


def test_what_does_not_run_as_its_users_run_it_is_said(release_in_chunks: Path) -> None:
    adapter = trainers.load_adapter(f"torchtitan@{release_in_chunks}")
    staged = case(ParallelDims(pp=2, dp_shard=2))
    assert adapter.traits(staged).loss_chunks == 1
    assert adapter.replaced(staged, "cpu") == (
        "loss: chunked cross entropy by whole cross entropy"
        " (FSDP2 gathers and reduces what it uses once a microbatch of a pipeline, which is not planned)",
        "attention: SDPA, whose samples lie each in a row of their own",
        "spmd_backend: spmd_types by partial_dtensor (torch 2.13 cannot shard its parameters)",
        "casts: those to float32 leave float64 as it is (a float64 recipe)",
        "communication: NCCL by gloo; averages are sums, then divided",
    )


@pytest.mark.parametrize(
    ("requested", "chunks"),
    [
        (case(ParallelDims(pp=2)), 8),
        (case(ParallelDims(pp=2), features=Features(schedule="InterleavedZeroBubble")), 1),
        (case(ParallelDims(pp=2, tp=2)), 1),
        (case(ParallelDims(dp_shard=2)), 8),
        (dataclasses.replace(case(), model=dataclasses.replace(case().model, tied_embeddings=True)), 1),
    ],
)
def test_the_loss_is_computed_at_once_where_its_chunks_do_more_than_is_planned(
    release_in_chunks: Path, requested: Case, chunks: int
) -> None:
    assert trainers.load_adapter(f"torchtitan@{release_in_chunks}").traits(requested).loss_chunks == chunks


def test_a_loss_in_chunks_is_one_loss_and_ends_the_forward_pass() -> None:
    torch = pytest.importorskip("torch")
    from harness.adapters.torchtitan.trainer_config import note_loss_function
    from harness.core.probe.clock import Clock
    from harness.core.probe.samples import SampleRecorder

    clock, labels, phases = Clock(), torch.arange(8).reshape(1, 8), []

    def cross_entropy(logits: Any, labels: Any) -> Any:
        phases.append(clock.phase())
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    class Chunked:
        num_chunks, fn = 4, staticmethod(cross_entropy)

        def __call__(self, hidden: Any, labels: Any) -> Any:
            phases.append(clock.phase())
            parts = zip(hidden.chunk(self.num_chunks, 1), labels.chunk(self.num_chunks, 1), strict=True)
            return sum(self.fn(hidden, labels) for hidden, labels in parts)

    recorder, loss = SampleRecorder(clock), Chunked()
    recorder.install()
    try:
        note_loss_function(loss)
        value = loss(torch.eye(8)[None], labels)
    finally:
        recorder.remove()
    (seen,) = recorder.microbatches(0)
    assert seen.labels is not None
    assert (seen.labels.ravel().tolist(), seen.valid_tokens) == (list(range(8)), 8)
    assert seen.loss_sum == pytest.approx(value.item())
    assert (phases, clock.phase()) == (["forward", *["other"] * 4], "other")
