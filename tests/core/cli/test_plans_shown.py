"""What `harness plan` shows."""

from __future__ import annotations

from typing import Any

from harness import ROOT
from harness.core.cli import main


def test_a_plan_shows_grid_groups_slices_and_bytes(capsys: Any) -> None:
    assert main(["plan", "hsdp_2x2"]) == 0
    told = capsys.readouterr().out
    for line in (
        "  3     1             1",
        "  dp_replicate  [0,2] [1,3]",
        "  dp_shard      [0,1] [2,3]",
        "    [1,3]  1/2 of dim 0 [128:256]",
        "  dp_replicate  gradients   all_reduce      backward  525.6 kB",
    ):
        assert line in told.splitlines()


def test_a_plan_of_16384_ranks_is_one_page_of_kinds_of_ranks(capsys: Any) -> None:
    assert main(["plan", "llama3_405b_16384"]) == 0
    told = capsys.readouterr().out.splitlines()
    for line in (
        "  dp_shard     128    128  [0,8,..,1016]         18.98 GB across 128 nodes",
        "   0  127         8  emb+0-6      0.369      6.11     12.2   124       144     0",
        "kinds of ranks: 18; GB of each rank",
        "    at its most 153.6 GB, in the backward of the last block, for which 184.3 GB are reserved: more",
        "  1F1B, 16 microbatches, 16 stages  92.4%  all together wait 48.6% of the time",
    ):
        assert line in told
    assert len(told) < 66 and max(map(len, told)) <= 100
    shown = (ROOT / "docs" / "preflight.md").read_text().splitlines()
    assert [line for line in told if line and f"    {line}" not in shown] == []


def test_a_plan_of_a_pipeline_shows_what_each_stage_holds(capsys: Any) -> None:
    assert main(["plan", "pp_2_fsdp_2"]) == 0
    assert "    [0]  1/2 of dim 0 [0:128]" in capsys.readouterr().out.splitlines()


def test_a_layout_in_no_file_is_planned_by_its_degrees(capsys: Any) -> None:
    assert main(["plan", "--dims", "dp_shard=64,tp=8", "--model", "8B"]) == 0
    assert "  model: 8B, as published" in capsys.readouterr().out.splitlines()
    assert main(["plan"]) == 2
    assert main(["plan", "--dims", "tp=3", "--model", "8B"]) == 2
    assert "n_heads 32 is not divisible by tp 3" in capsys.readouterr().err
