"""Ranks really run alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.preflight.chosen import Chosen
from harness.preflight.judging import judged
from harness.preflight.launches import fly
from harness.preflight.request import Request
from harness.preflight.text import preflight_text
from harness.report.cause_text import diagnosis_line
from harness.spec.loading import find_case, load_all
from tools.preflight_equal import compared


def test_a_rank_alone_leaves_the_evidence_that_it_leaves_among_its_peers(tmp_path: Path) -> None:
    case = find_case("fsdp_2_tp_2", load_all())
    short = replace(case, training=replace(case.training, steps=1), file="")
    assert dict(compared(short, tmp_path, (0, 3))) == {"examined": 2}


def test_hsdp_that_runs_as_fsdp_is_named_on_one_of_64_ranks(tmp_path: Path) -> None:
    case = Request(dims="dp_replicate=2,dp_shard=32", seq=64).case()
    flown = fly(case, (3,), tmp_path / "ranks", fault="hsdp_runs_as_fsdp")
    verdicts = judged(case, flown)
    assert verdicts.diagnosis is not None
    assert diagnosis_line(verdicts.diagnosis) == (
        "HSDP ran as FSDP: parameters are sharded over 64 ranks, requested 32, replicated 2 times"
    )
    text = preflight_text(case, Chosen({"as requested": (3,)}, 0), flown, verdicts, 0)
    assert "FAIL for 1 of 64 ranks" in text
    assert "63 other ranks" in text
