"""torchtitan on real ranks: the installed one, and two commits of a clone that TORCHTITAN_REPO names."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from harness.adapters.torchtitan import source
from harness.core.case.loading import find_case, load_all
from harness.core.judge.result import Verdict
from harness.core.report.cause_text import diagnosis_line
from harness.core.run.options import Options
from harness.core.run.run_case import run_case

REPO = os.environ.get("TORCHTITAN_REPO")
HSDP_WORKS, HSDP_IS_FSDP = "db6b39acd", "9a4eebe1c^"


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason=f"not installed; {source.HOW_TO_GET_IT}")
@pytest.mark.parametrize(
    "name", ["fsdp_4", "hsdp_2x2", "fsdp_2_accum_no_defer", "fsdp_2_tp_2", "pp_2", "cp_2", "tp_2_to_fsdp_2"]
)
def test_the_installed_one_passes_all_checks(tmp_path: Path, name: str) -> None:
    judgement = run_case(find_case(name, load_all()), Options(out=tmp_path, trainer="torchtitan"))
    assert judgement.verdict is Verdict.PASS, judgement.diagnosis


@pytest.mark.skipif(not REPO, reason="TORCHTITAN_REPO names no checkout of pytorch/torchtitan")
@pytest.mark.parametrize(
    ("commit", "verdict", "cause"),
    [
        (HSDP_WORKS, Verdict.PASS, None),
        (
            HSDP_IS_FSDP,
            Verdict.FAIL,
            "HSDP ran as FSDP: parameters are sharded over 4 ranks, requested 2, replicated 2 times",
        ),
    ],
)
def test_issue_711_is_seen_in_the_real_one(tmp_path: Path, commit: str, verdict: Verdict, cause: str | None) -> None:
    clone = tmp_path / "clone"
    for command in (
        ["clone", "--quiet", "--shared", "--no-checkout", str(REPO), str(clone)],
        ["-C", str(clone), "sparse-checkout", "set", "--no-cone", *source.FILES],
        ["-C", str(clone), "checkout", "--quiet", "--detach", commit],
    ):
        subprocess.run(["git", *command], check=True, capture_output=True)
    options = Options(out=tmp_path / "out", trainer=f"torchtitan@{clone}")
    judgement = run_case(find_case("hsdp_2x2_valid", load_all()), options)
    assert (judgement.verdict, judgement.diagnosis and diagnosis_line(judgement.diagnosis)) == (verdict, cause)
