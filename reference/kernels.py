"""The kind of processor, by which libraries choose their kernels: each kind sums, and so rounds, in its own order.

Gradients of FSDP over two ranks with float8_rowwise_with_gw_hp were measured (torch 2.13, Intel). Held to AVX2, they lie
4.6e-10 of the largest entry from the reference's, whose matmuls then sum in another order for fewer rows; with AVX-512 1e-15.
Two machines with AVX-512 whose first losses in bfloat16 differ by 2e-5 have the same noise.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
FLAGS = ("avx2", "avx512f", "amx_bf16")
MAKERS = ("GenuineIntel", "AuthenticAMD")
OVERRIDES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
"""Variables that make torch, MKL and oneDNN use less than the processor can."""


def cpu_kind() -> str:
    """Return the processor's kind: architecture, maker, vector instructions, and variables that limit them.

    For example "x86_64 GenuineIntel avx2 avx512f". Noise that was measured on one kind does not hold for another,
    unless `has_same_noise` returns True. Without /proc/cpuinfo only the architecture and variables are known.
    """
    text = CPU_INFO.read_text(encoding="utf-8", errors="replace") if CPU_INFO.exists() else ""
    maker = re.findall(r"^vendor_id\s*:\s*(\S+)", text, re.MULTILINE)[:1]
    flags_of_processor = re.findall(r"^flags\s*:(.*)", text, re.MULTILINE)[:1]
    flags = [flag for flag in FLAGS if flag in " ".join(flags_of_processor).split()]
    overrides = [f"{name}={os.environ[name]}" for name in OVERRIDES if os.environ.get(name)]
    return " ".join([platform.machine(), *maker, *flags, *overrides])


def has_same_noise(first_kind: str, second_kind: str) -> bool:
    """Return whether these kinds of processors have the same noise: with AVX-512 its maker does not matter.

    Measured (torch 2.13): AMD EPYC's against Intel's, 483 noises of parameters in float32, bfloat16 and 8 bits, 0.58 to 1.19
    times. A bound is 2 to 5 times the noise.
    """
    first = first_kind.split()
    second = second_kind.split()
    if "avx512f" in first and "avx512f" in second:
        first = [word for word in first if word not in MAKERS]
        second = [word for word in second if word not in MAKERS]
    return first == second
