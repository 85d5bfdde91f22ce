"""What adapters share."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.utils.data import DataLoader

from harness.adapters.support.training_function import TrainingFunction
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.trainers.support import process_group
from harness.core.trainers.support.names import pairs, renamed, with_tied_output
from harness.core.trainers.support.samples import RecipeStream, rank_samples
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.data import build_dataset


def test_names_are_told_part_by_part_and_others_stay() -> None:
    table = pairs("blocks=layers q=attention.wq")
    assert renamed("blocks.0.q.weight", table) == "layers.0.attention.wq.weight"
    assert renamed("q_norm.weight", table) == "q_norm.weight"


@pytest.mark.parametrize(
    ("pp", "tied", "schedule", "of_output"),
    [
        (2, True, "1F1B", "tok_embeddings.weight"),
        (2, False, "1F1B", "output.weight"),
        (1, True, "1F1B", "output.weight"),
        (2, True, "ZBVZeroBubble", "output.weight"),
    ],
)
def test_a_tied_output_of_a_last_stage_is_the_embedding(pp: int, tied: bool, schedule: str, of_output: str) -> None:
    model, features = ModelConfig(tied_embeddings=tied), Features(schedule=schedule)
    fqn = with_tied_output(
        Case("any", "-", ParallelDims(pp=pp), model, features=features), lambda name: f"{name}.weight"
    )
    assert [fqn(name) for name in ("output", "norm")] == [of_output, "norm.weight"]


@pytest.mark.parametrize(("step", "length"), [(1, 32), (2, 16)])
def test_ranks_have_every_sample_of_a_step_between_them_once(step: int, length: int) -> None:
    case = Case("any", "a test", ParallelDims(dp_shard=4), training=TrainingConfig(seq_len=32, variable_length=True))
    dataset = build_dataset(case.training, case.model)
    (tokens, labels), ranks = (
        rank_samples(case, dataset, step),
        [rank_samples(case, dataset, step, r, 4) for r in range(4)],
    )
    assert tokens.shape == labels.shape == (case.training.global_batch, length)
    for which, whole in enumerate((tokens, labels)):
        assert torch.equal(torch.stack([rank[which] for rank in ranks], 1).flatten(0, 1), whole)


@pytest.mark.parametrize("batch", [None, 4])
def test_workers_of_a_loader_bring_the_stream_that_one_alone_would(batch: int | None) -> None:
    case = Case("any", "a test", ParallelDims(dp_shard=2), training=TrainingConfig(seq_len=16, global_batch=8))
    case = replace(case, features=Features(accumulation=2))

    def brought(workers: int, batch: int | None) -> list[list[list[int]]]:
        stream = RecipeStream(case, 1, 2, batch=batch)
        loader = iter(DataLoader(stream, batch_size=batch or case.local_batch, num_workers=workers))
        return [tokens.tolist() for tokens, _ in itertools.islice(loader, 5)]

    alone = brought(0, batch)
    assert brought(2, batch) == alone
    assert len({tuple(row) for rows in alone for row in rows}) == 5 * (batch or 2)


def test_a_training_function_stops_where_it_waits_and_goes_on() -> None:
    seen = []

    def train(function: TrainingFunction) -> None:
        seen.append("set up")
        function.wait()
        seen.append("trained")

    function = TrainingFunction(train)
    function.set_up()
    assert seen == ["set up"]
    function.train()
    assert seen == ["set up", "trained"]


def test_what_a_training_function_raises_is_raised_and_one_that_never_waits_is_told() -> None:
    def fails(_: TrainingFunction) -> None:
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        TrainingFunction(fails).set_up()
    with pytest.raises(RuntimeError, match="ended before its first step"):
        TrainingFunction(lambda _: None).set_up()


def test_a_mesh_of_a_script_that_joins_no_group_itself_meets_where_the_launcher_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (dist, distributed_c10d, device_mesh):
        monkeypatch.setattr(module, "init_process_group", dist.init_process_group)  # undone afterwards
    for name, value in {"INIT_METHOD": f"file://{tmp_path}/meet", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    process_group.redirect()
    try:
        assert device_mesh.init_device_mesh("cpu", (1,)).size() == dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
