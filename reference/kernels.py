"""On which kernels numbers were rounded: libraries choose them by the processor, and each kind sums in its own order.

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


def kind_of_cpu() -> str:
    """Architecture, maker, vector instructions and what holds them back: "x86_64 GenuineIntel avx2 avx512f".

    Noise that was measured on one kind is another's on the next, but for what `noise_alike` says.
    """
    text = CPU_INFO.read_text(encoding="utf-8", errors="replace") if CPU_INFO.exists() else ""
    maker = re.findall(r"^vendor_id\s*:\s*(\S+)", text, re.MULTILINE)[:1]
    has = re.findall(r"^flags\s*:(.*)", text, re.MULTILINE)[:1]
    flags = [flag for flag in FLAGS if flag in " ".join(has).split()]
    held = [f"{name}={os.environ[name]}" for name in OVERRIDES if os.environ.get(name)]
    return " ".join([platform.machine(), *maker, *flags, *held])


def noise_alike(one: str, other: str) -> bool:
    """Whether these kinds have the same noise: with AVX-512 it does not matter who made the processor.

    Measured (torch 2.13): AMD EPYC's against Intel's, 483 noises of parameters in float32, bfloat16 and 8 bits, 0.58 to 1.19
    times. A bound is 2 to 5 times the noise.
    """
    kinds = [kind.split() for kind in (one, other)]
    if all("avx512f" in words for words in kinds):
        kinds = [[word for word in words if word not in MAKERS] for words in kinds]
    return kinds[0] == kinds[1]
