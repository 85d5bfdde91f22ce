"""Torch's switches: as they are before any code of a trainer has run, and as they are while a step is at work.

Looked at where phases of a step begin: at the first matmul of each forward and backward pass, and as an optimizer steps.
What is switched on and off again within a phase is not seen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness.core.probe.clock import Clock

RECORDED_VARIABLES = (
    *("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_NAN_CHECK"),
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
)
"""Variables that make ranks wait, or check every tensor that is sent; and those that change how CUDA's libraries compute."""


def _deterministic_text() -> str:
    """Return how torch treats operators that are not deterministic: "off" (uses them), "warn only" or "on" (refuses them)."""
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def _tf32_text() -> str:
    """Return whether CUDA's matmuls use TF32, as "on" or "off".

    Newer versions of torch have a precision instead of a switch, and refuse to read the switch where both were set."""
    matmul = torch.backends.cuda.matmul
    return _on_or_off(matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32)


def _float32_precision_text() -> str:
    """Return the precision of float32 matmuls.

    torch refuses to return it where the newer precision differs, which only TF32 does."""
    matmul = torch.backends.cuda.matmul
    newer = matmul.fp32_precision if hasattr(matmul, "fp32_precision") else "none"
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return f"{newer}, set by fp32_precision"


def _on_or_off(is_on: bool) -> str:
    return "on" if is_on else "off"


SWITCH_READERS: dict[str, Callable[[], str]] = {
    "autograd anomaly detection": lambda: _on_or_off(torch.is_anomaly_enabled()),
    "deterministic algorithms": _deterministic_text,
    "cudnn.deterministic": lambda: _on_or_off(torch.backends.cudnn.deterministic),
    "cudnn.benchmark": lambda: _on_or_off(torch.backends.cudnn.benchmark),
    "float32 matmul precision": _float32_precision_text,
    "TF32 in CUDA matmuls": _tf32_text,
    "bfloat16 sums in CUDA matmuls": lambda: _on_or_off(
        bool(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction)
    ),
    "mkldnn": lambda: _on_or_off(bool(torch.backends.mkldnn.enabled)),
    "cudnn": lambda: _on_or_off(bool(torch.backends.cudnn.enabled)),
    "denormal numbers": lambda: "kept" if sys.float_info.min / 2 else "flushed to 0",  # torch has no other way to ask
    "default dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
}
SETTING_READERS: dict[str, Callable[[], str]] = SWITCH_READERS | {
    "torch.distributed debug level": lambda: dist.get_debug_level().name if dist.is_available() else "OFF",
    "threads": lambda: str(torch.get_num_threads()),
}
SETTING_READERS |= {name: lambda name=name: os.environ.get(name, "unset") for name in RECORDED_VARIABLES}  # type: ignore[misc]


def read_settings() -> dict[str, str]:
    """Return the value of each of torch's settings and recorded variables now, as text, by name."""
    return {name: read() for name, read in SETTING_READERS.items()}


_settings_at_import = {name: read() for name, read in SWITCH_READERS.items()}
"""Read as this module is imported. The rank server does that right after torch: what it preloads then may set some."""


def settings_before_the_trainer() -> dict[str, str]:
    """Return the settings, torch's switches as they were when this module was imported.

    Call it before a trainer's first module is imported: the environment and threads are a rank's own."""
    return read_settings() | _settings_at_import


class SettingsRecorder:
    """started: as they were before the trainer's code ran, if that was read then; else as they are when this is installed."""

    def __init__(self, clock: Clock, started: dict[str, str] | None = None) -> None:
        self.settings_at_start = started or {}
        self._clock = clock
        self._steps: dict[int, dict[str, set[str]]] = {}

    def install(self) -> None:
        self.settings_at_start = self.settings_at_start or read_settings()

    def note_settings(self, *_: Any) -> None:
        """Note the settings of this moment for the step. Nothing in evaluation.

        Trap: OpenMP has a number of threads for each thread, and backward on GPUs has a separate thread. So "threads" is left
        out
        inside backward.
        """
        if self._clock.account.kind == "evaluation":
            return
        values_by_name = self._steps.setdefault(self._clock.step, {})
        in_backward = self._clock.phase() == "backward"
        for name, value in read_settings().items():
            if not (in_backward and name == "threads"):
                values_by_name.setdefault(name, set()).add(value)

    def settings_of(self, step: int) -> dict[str, tuple[str, ...]]:
        """Return the values that each setting had in a step, sorted, by name; empty if nothing was noted."""
        return {name: tuple(sorted(values)) for name, values in self._steps.get(step, {}).items()}
