"""What a checkpoint holds, by its index: names, shapes, types and bytes. No tensor of it is loaded.

Read is torch's distributed format (a folder with a .metadata file), which says where each piece of each tensor lies. Any
other format is only known not to be readable. A name may have anything before and after the parameter's:
"optimizer.state.layers.0.attention.wq.weight.exp_avg".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIED = "output.weight"
"""It is no separate parameter where embeddings are tied, but a state dict may list this name all the same."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a checkpoint's index names."""

    name: str
    """Name in the index."""
    fqn: str
    """Parameter that the name is about, in the reference's spelling; empty if it is about none."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """Dtype, as torch has it."""
    numbers: int
    """Number of elements that are stored; more than the shape's where pieces overlap."""


@dataclass(frozen=True)
class Checkpoint:
    """What the latest checkpoint in a folder holds."""

    tensors: tuple[SavedTensor, ...] = ()
    """Tensors that the index names."""
    objects: dict[str, int] | None = None
    """Name -> bytes of whatever is no tensor; None if it was not read."""
    unindexed: int = 0
    """Bytes of files that the index does not account for."""
    unread: str = ""
    """Reason why it could not be read; empty if it was read."""


def read(folder: Path, fqns: Collection[str], fqn: Callable[[str], str]) -> Checkpoint:
    """fqns: of the model's parameters. fqn: from a parameter's name in the trainer to the reference's."""
    complete = sorted(folder.rglob(".metadata"), key=lambda path: path.stat().st_mtime)
    if not complete:
        seen = sorted(path.name for path in folder.rglob("*") if path.is_file())
        named = f"{len(seen)} files, {seen[0]} among them" if seen else "no file"
        return Checkpoint(
            unread=f"{folder}: not complete in torch's distributed format, the only one read here: {named}"
        )
    try:
        index = _index(complete[-1].parent)
    except Exception as error:  # unpickling raises almost anything
        return Checkpoint(unread=f"its index {complete[-1]} cannot be read: {error!r}")
    lengths: Counter[str] = Counter()
    for place, stored in (index.storage_data or {}).items():
        lengths[place.fqn] += stored.length
    entries = index.state_dict_metadata.items()
    tensors = tuple(_tensor(name, _about(name, fqns, fqn), e) for name, e in entries if hasattr(e, "chunks"))
    objects = {name: lengths[name] for name, entry in entries if not hasattr(entry, "chunks")}
    written = sum(path.stat().st_size for path in _files(folder, [path.parent for path in complete[:-1]]))
    return Checkpoint(tensors, objects, unindexed=written - sum(lengths.values()))


def _index(folder: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    return FileSystemReader(folder).read_metadata()


def _tensor(name: str, fqn: str, entry: Any) -> SavedTensor:
    numbers = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    return SavedTensor(name, fqn, tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."), numbers)


def _about(name: str, fqns: Collection[str], fqn: Callable[[str], str]) -> str:
    """The parameter whose name stands in this one, the longest if several do."""
    parts = name.split(".")
    inside = (parts[i:j] for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
    found = [own for words in inside if (own := fqn(".".join(words))) in fqns]
    return max(found, key=len, default="")


def _files(folder: Path, older: Collection[Path]) -> Iterator[Path]:
    """All but the indices themselves and what lies in older checkpoints."""
    for path in folder.rglob("*"):
        if path.is_file() and path.name != ".metadata" and not any(place in path.parents for place in older):
            yield path
