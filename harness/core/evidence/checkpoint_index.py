"""The contents of a checkpoint, by its index: names, shapes, types and bytes. No tensor of it is loaded.

Only torch's distributed format is read: a folder with a .metadata file, which lists where each piece of each tensor lies. A
name in the index may have anything before and after the parameter's: "optimizer.state.layers.0.attention.wq.weight.exp_avg".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIED_OUTPUT_FQN = "output.weight"
"""The name of the output's weight. Tied embeddings make it no separate parameter, but a state dict may still list it."""


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
    """The contents of the latest checkpoint in a folder."""

    tensors: tuple[SavedTensor, ...] = ()
    """Tensors that the index names."""
    objects: dict[str, int] | None = None
    """Name -> bytes of whatever is no tensor; None if it was not read."""
    unindexed: int = 0
    """Bytes of files that the index does not account for."""
    unread: str = ""
    """Reason why it could not be read; empty if it was read."""


def read_checkpoint_index(folder: Path, fqns: Collection[str], fqn: Callable[[str], str]) -> Checkpoint:
    """Return the contents of the latest checkpoint below a folder, by the time of its index. Imports torch.

    If none is there, or the index cannot be read, only `unread` is set, to the reason. fqns: of the model's parameters.
    fqn: from a parameter's name in the trainer to the reference's.
    """
    index_files = sorted(folder.rglob(".metadata"), key=lambda path: path.stat().st_mtime)
    if not index_files:
        file_names = sorted(path.name for path in folder.rglob("*") if path.is_file())
        files_text = f"{len(file_names)} files, {file_names[0]} among them" if file_names else "no file"
        return Checkpoint(
            unread=f"{folder}: not complete in torch's distributed format, the only one read here: {files_text}"
        )
    *older, latest = index_files
    try:
        index = _load_metadata(latest.parent)
    except Exception as error:  # unpickling raises almost anything
        return Checkpoint(unread=f"its index {latest} cannot be read: {error!r}")
    lengths: Counter[str] = Counter()
    for piece, stored in (index.storage_data or {}).items():
        lengths[piece.fqn] += stored.length
    tensors = []
    objects = {}
    for name, entry in index.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            tensors.append(_saved_tensor(name, _fqn_in_name(name, fqns, fqn), entry))
        else:
            objects[name] = lengths[name]
    older_folders = [path.parent for path in older]
    written_bytes = sum(path.stat().st_size for path in _files_of_latest(folder, older_folders))
    return Checkpoint(tuple(tensors), objects, unindexed=written_bytes - sum(lengths.values()))


def _load_metadata(folder: Path) -> Any:
    """Return the index of a folder, unpickled by torch. Raises almost anything for a damaged one."""
    from torch.distributed.checkpoint import FileSystemReader

    return FileSystemReader(folder).read_metadata()


def _saved_tensor(name: str, fqn: str, entry: Any) -> SavedTensor:
    """Return the record of a tensor, whose elements are those of all its pieces together."""
    numbers = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    return SavedTensor(name, fqn, tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."), numbers)


def _fqn_in_name(name: str, fqns: Collection[str], fqn: Callable[[str], str]) -> str:
    """Return the parameter whose name is contained in this one, the longest if several are; empty if none is."""
    words = name.split(".")
    contained_fqns = []
    for start in range(len(words)):
        for stop in range(start + 1, len(words) + 1):
            contained = fqn(".".join(words[start:stop]))
            if contained in fqns:
                contained_fqns.append(contained)
    return max(contained_fqns, key=len, default="")


def _files_of_latest(folder: Path, older: Collection[Path]) -> Iterator[Path]:
    """Yield all files below a folder but the indices themselves and the files of older checkpoints."""
    for path in folder.rglob("*"):
        is_of_older = any(checkpoint in path.parents for checkpoint in older)
        if path.is_file() and path.name != ".metadata" and not is_of_older:
            yield path
