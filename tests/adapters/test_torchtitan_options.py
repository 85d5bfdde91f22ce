"""Options of torchtitan that a trainer's file requests, and validation, without torchtitan."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.adapters.torchtitan.data_loader import LoaderBuilder, Samples
from harness.adapters.torchtitan.job_config import configure_job, toml_text
from harness.adapters.torchtitan.metrics import note_processor
from harness.core import trainers
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.evidence.numbers import VALIDATION
from harness.core.trainers import Metrics

CASE = Case("any", "a test", ParallelDims(dp_shard=4))


def test_an_option_of_ones_own_takes_the_place_of_what_the_case_says() -> None:
    job = SimpleNamespace(metrics=SimpleNamespace(log_freq=10), training=SimpleNamespace(steps=9, seq_len=8))
    configure_job(job, CASE, {"metrics.log_freq": 3, "training.steps": None})
    assert (job.metrics.log_freq, job.training.steps, job.training.seq_len) == (3, 9, 32)
    with pytest.raises(ValueError, match="this torchtitan has no option metrics.often"):
        configure_job(job, CASE, {"metrics.often": True})


def test_who_parses_a_command_line_reads_options_of_ones_own_from_a_file() -> None:
    told = toml_text({"metrics.log_freq": 3, "experimental.splits": "layers.2", "experimental.batches": None})
    assert tomllib.loads(told) == {"metrics": {"log_freq": 3}, "experimental": {"splits": "layers.2"}}


def test_options_of_ones_own_are_said_with_every_verdict(checkout: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from harness.adapters.torchtitan import Torchtitan\n"
        'adapter = Torchtitan(options={"metrics.log_freq": 3}, chosen={"fsdp_units": "apart"}, shows=False)\n'
    )
    adapter = trainers.load_adapter(f"{file}@{checkout}")
    assert "metrics.log_freq: 3, requested by the trainer's file" in adapter.replaced(CASE, "cpu")
    assert (adapter.reports, adapter.reports_every, adapter.traits(CASE).fsdp_units) == ((), 3, "apart")
    assert trainers.load_adapter(f"torchtitan@{checkout}").reports_every == 1


def test_validation_after_a_step_is_of_the_samples_of_the_next() -> None:
    ahead = LoaderBuilder(CASE, Samples).build(dp_world_size=4, dp_rank=1, seq_len=32)
    steps = [next(iter(ahead))[0] for _ in range(3)]
    trained = list(Samples(CASE, 4, 1, lambda: None))
    assert [bool((tokens == trained[at][0]).all()) for tokens, at in zip(steps, (1, 2, 2), strict=True)] == [True] * 3


def test_the_loss_of_validation_is_the_next_steps() -> None:
    told: list[Metrics] = []
    processor = note_processor(SimpleNamespace(log=lambda *_: None, log_validation=lambda *_: None), told)
    processor.log(1, 5.0, 6.0, 0.5)
    processor.log_validation(loss=4.5, step=1)
    processor.log(2, 4.0, 4.1, 0.5)
    assert told == [Metrics(1, 5.0, 0.5, None, 6.0), Metrics(2, 4.5, 0.5, None)]


def test_the_loss_of_a_validation_that_a_case_requests_is_a_number_of_its_own() -> None:
    told: list[Metrics] = []
    processor = SimpleNamespace(log=lambda *_: None, log_validation=lambda *_: None)
    note_processor(processor, told, separately=True)
    processor.log(1, 5.0, 6.0, 0.5)
    processor.log_validation(loss=4.5, step=1)
    processor.log(2, 4.0, 4.1, 0.5)
    assert [one.loss for one in told] == [5.0, 4.0]
    assert [{number.of: number.value for number in one.numbers.values()} for one in told] == [{VALIDATION: 4.5}, {}]


def test_a_largest_loss_that_is_known_to_be_wrong_is_not_judged_and_that_is_said(release: Path) -> None:
    (release / "torchtitan" / "trainer.py").write_text("def train_step(self):\n    local_avg_loss = 0\n")
    adapter, cut = trainers.load_adapter(f"torchtitan@{release}"), Case("any", "a test", ParallelDims(cp=2))
    assert any(told.startswith("the largest loss that it reports: not judged") for told in adapter.replaced(cut, "cpu"))
    assert not any("largest" in told for told in adapter.replaced(CASE, "cpu"))
    told: list[Metrics] = []
    note_processor(SimpleNamespace(log=lambda *_: None), told, tells_largest=False).log(1, 5.0, 2.5)
    assert told == [Metrics(1, 5.0, None, None)]
