"""A step's samples, as a data-parallel rank reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.reference.data import Dataset, step_samples
from harness.spec.case import Case


def rank_samples(
    case: Case, dataset: Dataset, step: int, dp_rank: int = 0, dp_degree: int = 1
) -> tuple[Tensor, Tensor]:
    """Tokens and labels, int64 [global_batch / dp_degree, s], s the step's length. dataset: `build_dataset` of the case.

    Rank r reads every dp_degree-th sample from the r-th on, as torch's DistributedSampler cuts them. By default all.
    """
    mine = step_samples(case.training, len(dataset), step)[dp_rank::dp_degree]
    tokens, labels = (torch.stack(rows) for rows in zip(*(dataset[i] for i in mine), strict=True))
    return tokens[:, : case.seq_len(step)], labels[:, : case.seq_len(step)]
