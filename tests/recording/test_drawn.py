"""Equal samples that each rank augments or shuffles by itself, so that batches differ."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from forked_jobs import Main

from harness.core.cli.exit_codes import NOT_JUDGED, PASSED
from harness.recording.judged.stored_recording import load_recording

SCRIPT = str(Path(__file__).parents[1] / "augmenting_script.py")
RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]


@pytest.mark.slow("a job each; the first is judged in the same way", after=1)
@pytest.mark.parametrize("same", [False, True])
def test_ranks_that_draw_the_same_samples_are_not_taken_to_have_different_ones(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_main: Main
) -> None:
    if same:
        monkeypatch.setenv("SAME", "1")
    code = forked_main(["record", "-o", str(tmp_path / "one"), "--layout", "dp_replicate=2", "--", *RANKS])
    ranks = load_recording(tmp_path / "one").summaries
    assert ranks[0].received.batches[1] != ranks[1].received.batches[1]
    assert (ranks[0].received.drawn == ranks[1].received.drawn, len(ranks[0].received.drawn)) == (same, 4)
    assert code == (NOT_JUDGED if same else PASSED)
    assert [(one.modules.buffers, one.modules.wrappers) for one in ranks.values()] == [(2, {"ddp": 1})] * 2


@pytest.mark.slow("a job; test_ranks_that_draw_the_same_samples_are_not_taken_to_have_different_ones has such a job")
def test_ranks_that_shuffle_the_same_samples_each_by_itself_are_undecided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_main: Main
) -> None:
    monkeypatch.setenv("SHUFFLES", "1")
    code = forked_main(["record", "-o", str(tmp_path / "one"), "--layout", "dp_replicate=2", "--", *RANKS])
    ranks = load_recording(tmp_path / "one").summaries
    assert (
        ranks[0].received.batches[1] != ranks[1].received.batches[1]
        and ranks[0].received.drawn != ranks[1].received.drawn
    )
    assert [len({*one.received.samples[1]}) for one in ranks.values()] == [12, 12]
    assert len({*ranks[0].received.samples[1]} & {*ranks[1].received.samples[1]}) >= 8  # of 16 in all
    assert code == NOT_JUDGED
