"""Recordings of one small trainer in several layouts: the same training passes, a mistake fails where it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_jobs import Main
from json_documents import valid

from harness.core.cli import main

SCRIPT = str(Path(__file__).parents[1] / "layouts_script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory, forked_main: Main) -> Path:
    """One rank, and its noise beside it."""
    folder = tmp_path_factory.mktemp("trusted") / "one"
    alone = [sys.executable, SCRIPT, "--clip", "0.5"]
    assert forked_main(["record", "-o", str(folder), "--", *alone]) == 0
    assert forked_main(["record", "--noise", "-o", f"{folder}_noise", "--", *alone]) == 0
    return folder


def recorded(
    forked_main: Main, trusted: Path, out: Path, capsys: pytest.CaptureFixture[str], ranks: int, *words: str
) -> dict[str, Any]:
    """Record a layout, compare it with the trusted one, and return the document with the exit code of both commands."""
    job = [*TORCHRUN, str(ranks), SCRIPT, "--clip", "0.5", *words]
    code = forked_main(["record", "--same-as", str(trusted), "-o", str(out), "--", *job])
    capsys.readouterr()
    assert main(["compare", "--numbers", "--json", str(trusted), str(out)]) == code
    return json.loads(capsys.readouterr().out) | {"exit": code}


@pytest.mark.slow("a job each; the first two are judged in the same way", after=2)
@pytest.mark.parametrize(("layout", "ranks"), [("fsdp1_orig", 2), ("fsdp_tp_sp", 4), ("pp --joined-norm", 2)])
def test_the_same_training_in_another_layout_passes(
    layout: str,
    ranks: int,
    trusted: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    forked_main: Main,
) -> None:
    found = recorded(forked_main, trusted, tmp_path / "other", capsys, ranks, "--layout", *layout.split())
    assert (found["verdict"], found["exit"], found["steps"], found["parameters"]) == ("PASS", 0, [1, 2, 3], 16)
    assert {result["verdict"] for result in found["results"]} == {"PASS"}
    assert "float32" in found["bounds"]


def test_a_layout_beside_the_trusted_recording_is_judged_too(
    trusted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], forked_main: Main
) -> None:
    """It asks for HSDP and runs FSDP over all ranks, which no number shows."""
    out, job = str(tmp_path / "hsdp"), [*TORCHRUN, "4", SCRIPT, "--clip", "0.5", "--layout", "fsdp2"]
    options = ["--json", "--same-as", str(trusted), "--layout", "dp_replicate=2,dp_shard=2"]
    code = forked_main(["record", *options, "-o", out, "--", *job])
    document = valid(capsys.readouterr().out, "same_training")
    judged = document["recording"]
    assert (code, document["verdict"], document["numbers"], judged["verdict"]) == (1, "FAIL", "PASS", "FAIL")
    (cause,) = judged["diagnosis"]["causes"]
    assert cause["kind"] == "another layout"
    assert main(["compare", "--json", str(trusted), out]) == 1
    compared = valid(capsys.readouterr().out, "comparison")
    assert compared["numbers"]["verdict"] == "PASS"
    assert compared["differences"]


@pytest.mark.slow("a job each; the first two are judged in the same way", after=2)
@pytest.mark.parametrize(
    ("mistake", "layout", "check", "kind"),
    [
        ("halved", "fsdp2", "gradients", "gradients scaled"),
        ("changed", "fsdp2", "gradients", "weights changed between steps"),
        ("samples", "ddp", "samples", "same samples"),
        ("peers", "tp_sp", "samples", "peers differ"),
        ("", "pp", "grad_norm", "clipped by another norm"),  # each stage clips by its own
    ],
)
def test_a_mistake_fails_and_is_found_where_it_is_made(
    mistake: str,
    layout: str,
    check: str,
    kind: str,
    trusted: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    forked_main: Main,
) -> None:
    found = recorded(forked_main, trusted, tmp_path / "other", capsys, 2, "--layout", layout, "--mistake", mistake)
    assert (found["verdict"], found["exit"]) == ("FAIL", 1)
    cause = found["cause"]
    assert (cause["kind"], cause["explains"][0]) == (kind, check)
    details = dict(cause["details"])
    assert details["step"] == {"samples": 2, "changed": 3}.get(mistake, 1)
    assert details.get("factor") == (0.5 if mistake == "halved" else None)
