"""A reference that memory cannot hold is refused with its arithmetic, before anything is started."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from harness.core.case.case import Case
from harness.core.evidence.store import EvidenceError
from harness.core.launch import machine
from harness.core.run import reference_cache
from harness.core.run.options import Options
from harness.core.run.reference_memory import (
    activation_bytes_of,
    parameter_bytes_of,
    reason_never_fits,
    reason_not_fitting_now,
)
from harness.core.run.supported import reason_unsupported
from harness.reference.config import PRESETS, ModelConfig, TrainingConfig

GB = 10**9
LARGE = Case("single", "a test", model=PRESETS["1B"], file="/some/cases/first.yaml")
MODEL = ModelConfig(dim=128, n_layers=4, ffn_dim=512, vocab_size=4096)
SMALL = Case("small", "a test", model=MODEL, training=TrainingConfig(global_batch=4))

MEASURED = """
import re, sys
from pathlib import Path
from harness.core.evidence.store import save_stored
from harness.reference.train import train
from test_reference_memory import SMALL

def peak():  # getrusage's would be that of the process which started this one, if it had more
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before = peak()
save_stored(Path(sys.argv[1]), train(SMALL.model, SMALL.training))
print(peak() - before)
"""


def test_a_model_that_this_machine_cannot_hold_is_refused_with_file_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "total_memory", lambda: 64 * GB)
    reason = reason_unsupported(LARGE, Options())
    assert reason is not None
    assert_expected_inline(
        reason,
        """\
/some/cases/first.yaml: case 'single': the reference, 3 steps of 1,236 M parameters in float64 on one device, takes at least \
257.0 GB of memory, and this machine has 64.0 GB; for a trial request smaller sizes, and give the trainer the same: \
model: {dim: 2048, n_layers: 16, vocab_size: 128256}""",
    )
    assert reason_unsupported(Case("usual", "a test"), Options()) is None


def test_of_a_batch_that_is_too_large_the_keys_of_the_batch_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "total_memory", lambda: 64 * GB)
    training = TrainingConfig(global_batch=256, seq_len=8192)
    reason = reason_never_fits(Case("long", "a test", training=training), "cpu")
    assert "256 x 8192 tokens in one pass" in reason and reason.endswith("training: {global_batch: 256, seq_len: 8192}")
    assert reason_never_fits(Case("long", "a test", training=training), "cuda") == ""  # that is the GPU's memory


def test_what_does_not_fit_at_the_moment_is_not_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 100)
    monkeypatch.setattr(reference_cache, "launch", lambda job: pytest.fail("it was started"))
    with pytest.raises(
        EvidenceError, match=r"^case 'small': .* at least 0\.\d GB of memory, and there are now 0\.0 GB"
    ):
        reference_cache.reference_folder(SMALL, Options(out=tmp_path))


def test_noise_is_counted_as_one_run_more_and_a_gpu_holds_its_own_model() -> None:
    of = replace(SMALL, training=replace(SMALL.training, dtype="float32"))
    once, twice = parameter_bytes_of(of, "cpu", noise=False), parameter_bytes_of(of, "cpu", noise=True)
    assert once < twice < 2 * once
    assert activation_bytes_of(of, "cuda") == 0
    assert reason_not_fitting_now(of, "cpu", noise=True) == ""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks of memory are read from /proc")
def test_what_is_counted_is_most_of_what_it_takes_and_no_more(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "reference.npz")]
    took = int(subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout)
    counted = max(parameter_bytes_of(SMALL, "cpu", noise=False), activation_bytes_of(SMALL, "cpu"))
    assert 0.4 * took < counted < took, (counted, took)


def test_a_reference_that_is_killed_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reference_cache, "REFERENCE_ENTRY", "launch_entries:kills_itself")
    with pytest.raises(EvidenceError) as error:
        reference_cache.reference_folder(SMALL, Options(out=tmp_path))
    assert str(error.value) == (
        "the reference run of case 'small' failed, nothing can be judged: it was killed by SIGKILL, as the kernel does when"
        " memory runs out; request a smaller model or batch"
    )
