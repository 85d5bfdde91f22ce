"""Reading what a trainer exported: all *.safetensors, *.bin, *.pt and *.pth of a folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from harness.core.evidence.exported import ExportedTensor

SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_export(folder: Path) -> dict[str, ExportedTensor]:
    """Return every floating-point tensor of an export, by the name that it has in its file; those of other dtypes are
    left out.

    Raises what a damaged file makes torch or json raise.
    """
    tensors: dict[str, ExportedTensor] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".safetensors":
            tensors |= dict(_read_safetensors(path.read_bytes()))
        elif path.suffix in (".bin", ".pt", ".pth"):
            tensors |= dict(_read_pickled(path))
    return tensors


def _read_safetensors(data: bytes) -> Iterator[tuple[str, ExportedTensor]]:
    """Yield name and value of each floating-point tensor of a safetensors file; a value of bfloat16 is float32.

    The file has the length of a JSON header in 8 bytes, the header, and the bytes of all tensors.
    """
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__" or entry["dtype"] not in SAFETENSORS_DTYPES:
            continue
        dtype = SAFETENSORS_DTYPES[entry["dtype"]]
        begin, _ = entry["data_offsets"]
        stored = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        count = math.prod(entry["shape"])
        value = np.frombuffer(data, stored, count, start + begin)
        if dtype == "bfloat16":
            value = (value.astype(np.uint32) << 16).view(np.float32)
        yield name, ExportedTensor(dtype, value.reshape(entry["shape"]))


def _read_pickled(path: Path) -> Iterator[tuple[str, ExportedTensor]]:
    """Yield name and value of each floating-point tensor that torch saved: of its entry "model" if it has one, else of all.

    Nothing if the file holds no dict. Imports torch.
    """
    import torch

    from harness.core.probe.structure import as_numpy

    state: Any = torch.load(path, map_location="cpu", weights_only=True)
    for name, value in (state.get("model", state) if isinstance(state, dict) else {}).items():
        if torch.is_tensor(value) and value.is_floating_point():
            yield name, ExportedTensor(str(value.dtype).removeprefix("torch."), as_numpy(value))
