"""The kind of CPU that numbers are rounded on."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.reference import kernels
from harness.reference.kernels import cpu_kind, has_same_noise

TWO_CORES = """\
processor\t: 0
vendor_id\t: AuthenticAMD
flags\t\t: fpu sse4_2 fma avx avx2 bmi2

processor\t: 1
vendor_id\t: AuthenticAMD
flags\t\t: fpu sse4_2 fma avx avx2 bmi2
"""


@pytest.fixture(autouse=True)
def on_x86(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(kernels, "CPU_INFO", tmp_path / "cpuinfo")
    for name in kernels.OVERRIDES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cpuinfo"


def test_the_maker_and_the_vector_instructions_name_it(on_x86: Path) -> None:
    on_x86.write_text(TWO_CORES)
    assert cpu_kind() == "x86_64 AuthenticAMD avx2"


def test_what_holds_the_libraries_back_makes_another_kind(on_x86: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_x86.write_text(TWO_CORES)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert cpu_kind() == "x86_64 AuthenticAMD avx2 ONEDNN_MAX_CPU_ISA=SSE41"


def test_where_nothing_is_told_the_architecture_is_all() -> None:
    assert cpu_kind() == "x86_64"


def test_with_avx_512_the_maker_does_not_matter_for_noise() -> None:
    intel = "x86_64 GenuineIntel avx2 avx512f"
    assert has_same_noise(intel, "x86_64 AuthenticAMD avx2 avx512f")
    assert not has_same_noise(intel, "x86_64 AuthenticAMD avx2")
    assert not has_same_noise(intel, "x86_64 AuthenticAMD avx2 avx512f ONEDNN_MAX_CPU_ISA=AVX2")
    assert not has_same_noise(intel, "x86_64 GenuineIntel avx2 avx512f amx_bf16")
    assert not has_same_noise("x86_64 GenuineIntel avx2", "x86_64 AuthenticAMD avx2")
