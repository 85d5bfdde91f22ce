"""Samples can be told apart, are masked unequally, and are drawn in the order of torch's DistributedSampler."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.data import (
    IGNORED,
    SEPARATOR,
    FileDataset,
    TokenDataset,
    build_dataset,
    document_indices,
    sample_order,
    step_length,
    step_samples,
)

RECIPE = TrainingConfig()


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    """tokens, labels [1024, 32] of the default recipe."""
    dataset = build_dataset(RECIPE, ModelConfig())
    tokens, labels = zip(*(dataset[i] for i in range(len(dataset))), strict=True)
    return torch.stack(tokens).numpy(), torch.stack(labels).numpy()


def saved(path: Path, ids: np.ndarray) -> str:
    np.save(path, ids)
    return str(path)


def test_every_row_and_every_eight_tokens_at_a_known_place_name_one_sample(rows: tuple[np.ndarray, np.ndarray]) -> None:
    tokens, _ = rows
    assert tokens.shape == (1024, 32)
    for start in range(32 - 8 + 1):
        assert len(np.unique(tokens[:, start : start + 8], axis=0)) == 1024, f"tokens {start} to {start + 7}"


def test_labels_are_the_next_tokens_masked_from_the_left(rows: tuple[np.ndarray, np.ndarray]) -> None:
    tokens, labels = rows
    valid = labels != IGNORED
    assert np.array_equal(labels[:, :-1][valid[:, :-1]], tokens[:, 1:][valid[:, :-1]])
    assert valid[:, -1].all() and (np.diff(valid.astype(int)) >= 0).all()
    assert (valid.sum(axis=1).min(), valid.sum(axis=1).max()) == (1, 32)


def test_a_quarter_of_the_samples_is_nine_tenths_masked_and_a_quarter_hardly(
    rows: tuple[np.ndarray, np.ndarray],
) -> None:
    valid = (rows[1] != IGNORED).sum(axis=1)  # 32 labels, less 0, 8, 16 or 28, less 0 to 4
    assert [int(((low <= valid) & (valid <= high)).sum()) for low, high in ((28, 32), (20, 24), (12, 16), (1, 4))] == [
        256
    ] * 4


def test_documents_have_unequal_lengths_and_a_separator_between(rows: tuple[np.ndarray, np.ndarray]) -> None:
    ends = [np.flatnonzero(row == SEPARATOR) for row in rows[0]]
    lengths = {int(length) for places in ends for length in np.diff(places) - 1}
    assert lengths == set(range(3, 16))
    assert min(len(places) for places in ends) >= 1


def test_every_sixteenth_of_the_vocabulary_is_read_in_each_step(rows: tuple[np.ndarray, np.ndarray]) -> None:
    for step in (1, 2, 3):
        tokens = rows[0][list(step_samples(RECIPE, 1024, step))]
        assert set((tokens // 16).ravel()) == set(range(16))


@pytest.mark.parametrize("ways", [2, 4, 8, 16])
@pytest.mark.parametrize("seed, global_batch", [(1234, 16), (0, 16), (1, 32), (2, 128)])
def test_no_split_of_a_global_batch_gives_every_rank_equally_many_valid_tokens(
    ways: int, seed: int, global_batch: int
) -> None:
    training = TrainingConfig(seed=seed, global_batch=global_batch)
    dataset = build_dataset(training, ModelConfig())
    for step in range(1, 11):
        ids = step_samples(training, len(dataset), step)
        valid = np.array([int((dataset[i][1] != IGNORED).sum()) for i in ids])
        assert len(set(valid.reshape(ways, -1).sum(axis=1))) > 1, f"contiguous, step {step}"
        assert len(set(valid.reshape(-1, ways).sum(axis=0))) > 1, f"strided, step {step}"


def test_a_sample_depends_on_seed_and_index_alone() -> None:
    one, same, other = (TokenDataset(256, 32, 64, seed) for seed in (5, 5, 6))
    assert torch.equal(one[9][0], same[9][0]) and torch.equal(one[9][1], same[9][1])
    assert not torch.equal(one[9][0], other[9][0])


@pytest.mark.parametrize("dp", [1, 2, 4, 8, 16])
def test_the_order_is_that_of_torchs_distributed_sampler(dp: int) -> None:
    dataset = build_dataset(RECIPE, ModelConfig())
    for epoch in (0, 1):
        order = sample_order(RECIPE, len(dataset), epoch)
        for rank in range(dp):
            sampler = DistributedSampler(dataset, num_replicas=dp, rank=rank, seed=RECIPE.seed)  # type: ignore[arg-type, var-annotated]
            sampler.set_epoch(epoch)
            assert list(sampler) == order[rank::dp]


@pytest.mark.parametrize("dp", [1, 2, 4, 8, 16])
def test_the_ranks_local_batches_of_a_step_are_together_its_global_batch(dp: int) -> None:
    order, local = sample_order(RECIPE, 1024, 0), 16 // dp
    for step in (1, 2, 64):
        ranks = [order[rank::dp][(step - 1) * local : step * local] for rank in range(dp)]
        assert tuple(i for column in zip(*ranks, strict=True) for i in column) == step_samples(RECIPE, 1024, step)


def test_the_step_after_an_epoch_begins_the_next_epochs_order() -> None:
    assert step_samples(RECIPE, 1024, 64) == tuple(sample_order(RECIPE, 1024, 0)[-16:])
    assert step_samples(RECIPE, 1024, 65) == tuple(sample_order(RECIPE, 1024, 1)[:16])


def test_torchs_data_loader_takes_both_datasets_and_a_pickle_of_a_file_is_its_path(tmp_path: Path) -> None:
    file = FileDataset(saved(tmp_path / "t.npy", np.arange(100_000) % 256), 32, 256)
    for dataset in (TokenDataset(256, 32, 8, 0), file):
        copy = pickle.loads(pickle.dumps(dataset))
        tokens, labels = next(iter(DataLoader(copy, batch_size=4)))
        assert (tokens.shape, labels.dtype) == ((4, 32), torch.int64)
    assert len(pickle.dumps(file)) < 1000


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_a_file_is_cut_into_consecutive_rows_of_whole_steps(tmp_path: Path, dtype: str) -> None:
    training = TrainingConfig(seq_len=4, global_batch=2, data=saved(tmp_path / "t.npy", np.arange(30, dtype=dtype)))
    dataset = build_dataset(training, ModelConfig())
    assert len(dataset) == 6  # 7 rows of 4 fit in 29 tokens; 6 is a multiple of global_batch
    tokens, labels = dataset[5]
    assert (tokens.tolist(), labels.tolist()) == ([20, 21, 22, 23], [21, 22, 23, 24])
    assert tokens.dtype == labels.dtype == torch.int64


def test_iterating_over_a_dataset_ends() -> None:
    assert len(list(TokenDataset(256, 8, 5, 0))) == 5  # type: ignore[call-overload]


def test_a_missing_short_or_foreign_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent.npy: no such token file \(training.data\); save the token ids with"):
        FileDataset(tmp_path / "absent.npy", 4, 256)
    short = saved(tmp_path / "short.npy", np.arange(8))
    with pytest.raises(ValueError, match=r"short.npy: 8 tokens are too few .* 2 \* seq_len 4 \+ 1 = 9; give a longer"):
        FileDataset(short, 4, 256, global_batch=2)
    (tmp_path / "text.npy").write_text("once upon a time")
    with pytest.raises(ValueError, match=r"text.npy: not a .npy file .*numpy.save"):
        FileDataset(tmp_path / "text.npy", 4, 256)
    with pytest.raises(ValueError, match=r"real.npy: holds float64 of shape \(8,\); .*numpy.save"):
        FileDataset(saved(tmp_path / "real.npy", np.ones(8)), 4, 256)


def test_a_token_beyond_the_vocabulary_is_named_when_its_sample_is_read(tmp_path: Path) -> None:
    dataset = FileDataset(saved(tmp_path / "big.npy", np.arange(250, 270)), 4, 256)
    assert dataset[0][0].tolist() == [250, 251, 252, 253]
    with pytest.raises(
        ValueError, match=r"big.npy: sample 1 \(tokens 4 to 8\) holds ids from 254 to 258, but vocab_size"
    ):
        dataset[1]


def test_a_separator_ends_its_document() -> None:
    assert document_indices(torch.tensor([[5, 0, 6, 7, 0, 0, 8], [0, 1, 1, 1, 1, 1, 0]])).tolist() == [
        [0, 0, 1, 1, 1, 2, 3],
        [0, 1, 1, 1, 1, 1, 1],
    ]


def test_with_masked_samples_every_fourth_sample_drawn_has_no_label_and_the_others_are_as_before() -> None:
    without, with_them = (
        build_dataset(training, ModelConfig()) for training in (RECIPE, TrainingConfig(masked_samples=True))
    )
    for step in (1, 2, 64):
        for place, id_ in enumerate(step_samples(RECIPE, len(without), step)):
            (tokens, labels), (same, masked) = without[id_], with_them[id_]
            assert torch.equal(tokens, same)
            assert (masked == IGNORED).all() if place % 4 == 3 else torch.equal(labels, masked)


def test_with_variable_length_even_steps_are_half_as_long() -> None:
    assert [step_length(TrainingConfig(variable_length=True), step) for step in (1, 2, 3, 4)] == [32, 16, 32, 16]
    assert [step_length(RECIPE, step) for step in (1, 2)] == [32, 32]


def test_the_last_step_of_a_recipe_may_have_fewer_samples() -> None:
    training = TrainingConfig(steps=3, global_batch=16, last_batch=8)
    size = len(build_dataset(training, ModelConfig()))
    steps = [step_samples(training, size, step) for step in (1, 2, 3)]
    assert [len(ids) for ids in steps] == [16, 16, 8]
    assert sorted(id_ for ids in steps for id_ in ids) == list(range(40))
