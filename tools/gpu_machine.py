"""What a machine with a GPU is like, as far as a run of `tools.gpu` needs to know: read, printed, kept; nothing is set.

The packages that harness and its trainer need travel as wheels in .gpu-packages/, where the machine has no network:
`make gpu-packages` brings those of WHEELS there. Without torchao recipes in 8 bits are left out, without pytest tests are.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from typing import Any

from harness.core.launch.machine import run_driver_tool
from harness.core.run.communication import SHARES_GPUS_SINCE, nccl_version

NEEDED = {
    "torch": "everything",
    "numpy": "everything",
    "PyYAML": "everything",
    "torchao": "recipes in float8 and MXFP8",
    "triton": "cases with compile",
    "pytest": "tests, and checks as pytest items",
    "pytest-xdist": "tests, and checks as pytest items",
    "expecttest": "tests",
    "transformers": "the trainer transformers, and some tests",
}
"""By package, what cannot be done without."""

DRIVER = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def describe_machine(device: str) -> dict[str, Any]:
    """Return plain values on this machine: GPUs, cores, versions, packages that are installed and missing.

    It asks torch for its libraries' versions, and CUDA for nothing: ranks are forked later.
    """
    import torch

    versions = {name: version_of(name) for name in NEEDED}
    return {
        "device": device,
        "gpus": run_driver_tool(DRIVER) if device == "cuda" else [],
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
        "nccl": ".".join(map(str, nccl_version())),
        "packages": {name: version for name, version in versions.items() if version},
        "missing": [name for name, version in versions.items() if not version],
    }


def version_of(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def lines(machine: dict[str, Any]) -> list[str]:
    """Return lines on the machine for a person, and on what is not done without missing packages."""
    gpus = machine["gpus"] or ["none"]
    found = [f"GPU          {gpu}" for gpu in gpus]
    found += [f"{name:<12} {machine[name]}" for name in ("cores", "python", "torch", "cuda", "cudnn", "nccl")]
    found.append("several ranks on one GPU: " + sharing(machine))
    found += [f"without {name}: no {NEEDED[name]}" for name in machine["missing"]]
    return found


def sharing(machine: dict[str, Any]) -> str:
    """Return how ranks on one GPU communicate: by NCCL if its version can, else by gloo."""
    since = ".".join(map(str, SHARES_GPUS_SINCE))
    version = tuple(int(part) for part in machine["nccl"].split("."))
    by_nccl = version >= SHARES_GPUS_SINCE
    return f"by NCCL {machine['nccl']}" if by_nccl else f"by gloo, for NCCL is {machine['nccl']} and not {since}"


def label(machine: dict[str, Any]) -> str:
    """Return a folder's label, such as NVIDIA-H200-torch2.11.0."""
    kind = machine["gpus"][0].partition(",")[0] if machine["gpus"] else machine["device"]
    version = machine["torch"].partition("+")[0]
    return f"{re.sub(r'[^0-9A-Za-z.]+', '-', kind)}-torch{version}"
