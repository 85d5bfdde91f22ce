"""A number that a trainer reports by name, and what it means: a count, a rate, an epoch, or a mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SPLIT = ("dp_replicate", "dp_shard", "cp")
"""The axes along which ranks receive different tokens."""
AXES = ("pp", *SPLIT, "tp")
COUNTS = ("samples", "tokens", "valid tokens", "steps", "epochs")
VALIDATION = "validation loss"
NORM = "parameter norm"
MEAN = "mean"
MEANINGS = (*COUNTS, "epoch", VALIDATION, NORM, MEAN)


@dataclass(frozen=True)
class Number:
    """A number as a rank reports it, with its meaning."""

    value: float
    """The number that is shown."""
    of: str
    """What it counts: samples, tokens, valid tokens, steps, epochs (the recipe's samples over those of the data set); or
    "epoch", the number from 0 of the step's; or "validation loss", the mean over valid tokens, after the step; or "parameter
    norm", the 2-norm of all parameters after the step; or "mean", of whatever `total` and `count` are of."""
    over: tuple[str, ...] = SPLIT
    """Axes over whose ranks it is put together, of dp_replicate, dp_shard and cp; along others it is the rank's own part."""
    steps: int | None = 1
    """Of how many steps it is, this one the last; None: of all since the training began."""
    divided_by: tuple[str, ...] = ()
    """Axes by whose degrees it is divided, as a number for each device is."""
    times: float = 1.0
    """Constant that it is multiplied by: of MFU, the FLOPs of a token over those that the devices can do in a second."""
    data_size: int | None = None
    """Of epochs, the samples of the data set, where that is the trainer's file; None: as the recipe has it."""
    rate: bool = False
    """Whether it is divided by seconds."""
    seconds: float | None = None
    """Of a rate, the seconds; None: they are not handed over, and the number is not judged."""
    tokens: np.ndarray | None = None
    """Of a validation loss: int64 [samples, positions], the rank's share before cp cuts it; None: what its passes received."""
    labels: np.ndarray | None = None
    """Labels of these tokens, -100 where one does not count."""
    total: float | None = None
    """Of a mean, the sum that this rank adds to it; None: the rank has no part in it, as one without the last stage."""
    count: float | None = None
    """Of a mean, how many this rank's sum is of; a share of a sample where cp cuts samples."""
    per: str = ""
    """What a mean is over, if these can be counted: samples, tokens or valid tokens. It is divided by those received."""

    def __post_init__(self) -> None:
        if self.of not in MEANINGS:
            raise ValueError(f"of {self.of!r}: choose one of {', '.join(MEANINGS)}")
        for key, known in (("over", SPLIT), ("divided_by", AXES)):
            if unknown := [axis for axis in getattr(self, key) if axis not in known]:
                raise ValueError(f"{key} {unknown[0]!r}: choose of {', '.join(known)}")
        if (self.tokens is None) != (self.labels is None):
            raise ValueError("tokens and labels of a validation loss are handed over together, or not at all")
        if self.per and self.per not in COUNTS[:3]:
            raise ValueError(f"per {self.per!r}: choose one of {', '.join(COUNTS[:3])}")
