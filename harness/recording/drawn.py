"""Samples that a rank's data loaders draw: after augmentation, equal samples are other inputs on each rank."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data import dataloader

from harness.core.evidence.keys import stable_digest

MOST_BATCHES = 4
"""Batches of a loader that are looked at, and loaders."""


class DrawnSamples:
    """Notes what loaders draw that choose samples by index. What a data set answers for an index is not looked at."""

    def __init__(self) -> None:
        self._by_loader: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._latest: list[int] | None = None
        self._trained: list[list[int]] = []

    def install(self, timed: Callable[..., Any]) -> None:
        """Wrap torch's iterator of loaders, so that the indices it draws are noted. Nothing if this torch has another way.

        timed: calls a function in chosen steps only.
        """
        draw = getattr(getattr(dataloader, "_BaseDataLoaderIter", None), "_next_index", None)
        if draw is None:  # a torch that has another way, then nothing is noted
            return

        @functools.wraps(draw)
        def draw_and_note(loader: Any) -> Any:
            indices = draw(loader)
            timed(self._note_indices, loader, indices)
            return indices

        dataloader._BaseDataLoaderIter._next_index = draw_and_note

    def _note_indices(self, loader: Any, indices: Any) -> None:
        """Note a digest of the indices of a batch. An iterable data set has none."""
        if indices is None or (isinstance(indices, list) and None in indices):
            return
        self._latest = self._by_loader.setdefault(loader, [])
        if len(self._latest) < MOST_BATCHES:
            self._latest.append(stable_digest(repr(indices)))

    def note_loader_trains(self) -> None:
        """Note that what was drawn last feeds the pass that begins: other loaders are of evaluations. If one of these comes
        between, it is taken for another that feeds."""
        if (
            self._latest is not None
            and len(self._trained) < MOST_BATCHES
            and not any(loader_digests is self._latest for loader_digests in self._trained)
        ):
            self._trained.append(self._latest)

    @property
    def digests(self) -> tuple[int, ...]:
        """Return one number for each batch of indices, of loaders that feed training."""
        return tuple(itertools.chain.from_iterable(self._trained))
