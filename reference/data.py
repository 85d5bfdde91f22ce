"""The data set: samples of tokens with unequally masked labels, and the order in which they are drawn.

A sample is (tokens, labels), both int64 [seq_len]; labels are the next tokens, IGNORED where they do not count in the
loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .config import ModelConfig, TrainingConfig

IGNORED = -100  # torch.nn.functional.cross_entropy's default ignore_index
SEPARATOR = 0  # stands between two documents
MASKED = np.array([0.0, 0.25, 0.5, 0.9])  # fractions of a sample's labels
MASKED_PLACE = 3  # in every four samples drawn, the one that masked_samples leaves without labels


class Dataset(Protocol):
    """The interface that a sampler and a torch DataLoader need."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...


class TokenDataset:
    """Documents made from a seed, that a small model can learn and whose every row differs from all others.

    Half of the tokens are one of the four ids after their predecessor; the others are drawn anew, small ids more often.
    Documents of unequal lengths are packed into each row. Samples are made when requested and depend on (seed, index).
    """

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        n_samples: int,
        seed: int,
        global_batch: int = 16,
        masked_samples: bool = False,
        all_valid: bool = False,
    ) -> None:
        if vocab_size < 16:
            raise ValueError(f"vocab_size {vocab_size}: at least 16 are needed to distinguish samples")
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.n_samples = n_samples
        self.seed = seed
        self.masked = masked_fractions(epoch_order(n_samples, seed), global_batch)
        if masked_samples:
            self.masked[epoch_order(n_samples, seed)[MASKED_PLACE::4]] = 1.0
        self.all_valid = all_valid

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.n_samples:
            raise IndexError(f"sample {index} of {self.n_samples}")
        generator = np.random.Generator(np.random.PCG64([self.seed, index]))
        row = pack_documents(random_walk_tokens(self.seq_len + 1, self.vocab_size, generator), generator)
        labels = row[1:].copy()
        if not self.all_valid:
            labels[: masked_count(self.masked[index], self.seq_len, generator)] = IGNORED
        return torch.from_numpy(row[:-1].copy()), torch.from_numpy(labels)


def random_walk_tokens(length: int, vocab_size: int, generator: np.random.Generator) -> np.ndarray:
    """Return token ids from 1 up: each is 1 to 4 above its predecessor (modulo), or drawn anew. int64 [length]"""
    anew = generator.random(length) < 0.5
    anew[0] = True
    drawn = ((vocab_size - 1) * generator.random(length) ** 3).astype(np.int64)  # cubed: small ids more often
    climbed = np.cumsum(generator.integers(1, 5, length))
    since = np.maximum.accumulate(np.where(anew, np.arange(length), 0))  # where the current climb began
    return 1 + (drawn[since] + climbed - climbed[since]) % (vocab_size - 1)


def pack_documents(row: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Put separators into a row, in place, so that documents of 3 to about len/2 tokens result, and return the row."""
    lengths = generator.integers(3, max(4, len(row) // 2), size=len(row))
    ends = np.cumsum(lengths + 1) - 1
    row[ends[ends < len(row)]] = SEPARATOR
    return row


def masked_fractions(order: np.ndarray, global_batch: int) -> np.ndarray:
    """Return the masked fraction of labels by sample id, float64.

    No equal split of a step of epoch 0 has equally many valid tokens. Every second place in a batch is masked more than
    the one before, and the second half more than the first. So neither the strided nor the contiguous split over 2
    ranks is even, and splits over 4, 8, 16, which refine them, cannot be.
    """
    position = np.arange(len(order)) % global_batch  # in its batch
    fractions = np.empty(len(order))
    fractions[order] = MASKED[2 * (position % 2) + 2 * position // global_batch]
    return fractions


def masked_count(fraction: float, seq_len: int, generator: np.random.Generator) -> int:
    """Return how many labels, from the left, are masked: the fraction of seq_len, and up to an eighth more by chance.

    At least one stays, unless the fraction is 1.
    """
    if fraction == 1:
        return seq_len
    return min(int(fraction * seq_len) + int(generator.integers(0, seq_len // 8 + 1)), seq_len - 1)


class FileDataset:
    """Consecutive rows of a token file: .npy (numpy.save), one axis, any integer dtype. No label is masked.

    Rows share no token but the one that is the last label of one and the first token of the next. The file is mapped
    anew for every sample, so that the dataset pickles as its path and not as the tokens.
    """

    def __init__(self, path: str | Path, seq_len: int, vocab_size: int, global_batch: int = 1) -> None:
        self.path = Path(path)
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        n_tokens = len(self._tokens())
        self.n_samples = (n_tokens - 1) // seq_len // global_batch * global_batch
        if self.n_samples < 1:
            raise ValueError(
                f"{path}: {n_tokens} tokens are too few for one step: global_batch {global_batch} * seq_len {seq_len} "
                f"+ 1 = {global_batch * seq_len + 1}; give a longer file, or lower training.global_batch or seq_len"
            )

    def __len__(self) -> int:
        return self.n_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.n_samples:
            raise IndexError(f"sample {index} of {self.n_samples}")
        start = index * self.seq_len
        row = self._tokens()[start : start + self.seq_len + 1].astype(np.int64)
        if row.min() < 0 or row.max() >= self.vocab_size:
            raise ValueError(
                f"{self.path}: sample {index} (tokens {start} to {start + self.seq_len}) holds ids from {row.min()} to "
                f"{row.max()}, but vocab_size is {self.vocab_size}; tokenize for this model or raise model.vocab_size"
            )
        return torch.from_numpy(row[:-1].copy()), torch.from_numpy(row[1:].copy())

    def _tokens(self) -> np.ndarray:
        """Return the file's tokens, mapped into memory.

        ValueError if it is missing, no .npy file, or not one axis of integers.
        """
        remedy = "save the token ids with numpy.save(path, ids), ids a 1-D integer array"
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no such token file (training.data); {remedy}")
        try:
            tokens = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise ValueError(f"{self.path}: not a .npy file ({error}); {remedy}") from error
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"{self.path}: holds {tokens.dtype} of shape {tokens.shape}; {remedy}")
        return tokens


def build_dataset(training: TrainingConfig, model: ModelConfig) -> TokenDataset | FileDataset:
    """Return the recipe's dataset: the file `training.data`, or 64 steps' worth of samples made from `training.seed`.

    Its length is a multiple of global_batch, so that no sampler has to pad or drop. With last_batch it ends with the recipe.
    """
    if training.data is not None:
        return FileDataset(training.data, training.seq_len, model.vocab_size, training.global_batch)
    return TokenDataset(
        model.vocab_size,
        training.seq_len,
        training.made_samples,
        training.seed,
        training.global_batch,
        training.masked_samples,
        training.all_valid,
    )


def document_indices(tokens: Tensor) -> Tensor:
    """Return the number, from 0, of the document that each token is in; a separator ends its own. int64 [b, s]"""
    ends = (tokens == SEPARATOR).long()
    return ends.cumsum(dim=-1) - ends


def epoch_order(n_samples: int, seed: int) -> np.ndarray:
    """Return the permutation of sample ids that torch's DistributedSampler(shuffle=True) draws. int64 [n_samples]

    seed: its seed + epoch.
    """
    return torch.randperm(n_samples, generator=torch.Generator().manual_seed(seed)).numpy()


def sample_order(training: TrainingConfig, n_samples: int, epoch: int) -> list[int]:
    """Return the sample ids of one epoch, as torch's DistributedSampler(shuffle=True, seed=training.seed) has them.

    Rank r of dp takes order[r::dp], so the ranks' local batches of a step are together order[k * GB : (k + 1) * GB].
    """
    return [int(sample_id) for sample_id in epoch_order(n_samples, training.seed + epoch)]


def step_length(training: TrainingConfig, step: int) -> int:
    """Return how many tokens of each sample, from its first, a step (from 1) trains on."""
    if training.variable_length and step % 2 == 0:
        return training.seq_len // 2
    return training.seq_len


def step_samples(training: TrainingConfig, n_samples: int, step: int) -> tuple[int, ...]:
    """Return the sample ids of one step, counted from 1; epochs follow one another without a gap."""
    epoch, start = divmod((step - 1) * training.global_batch, n_samples)
    return tuple(sample_order(training, n_samples, epoch)[start : start + training.global_batch])
