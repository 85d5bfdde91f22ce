"""Which faults the gate makes of a change."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from harness.faults import all_faults, load_fault
from tools import drawn_faults
from tools.drawn_faults import can_affect, draw_faults, is_in_the_quarter

FAULT = load_fault("hsdp_runs_as_fsdp")


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("harness/faults/catalogue/mesh.py", True),
        ("harness/core/checks/shard_contents.py", True),
        ("harness/core/trainers/llama3/parallelize.py", True),
        ("harness/core/causes/request.py", True),
        ("harness/faults/catalogue/clipping.py", False),
        ("harness/core/checks/loss.py", False),
        ("harness/core/trainers/llama3/clip.py", False),
        ("harness/core/report/text.py", False),
        ("harness/core/checks/not_there_any_more.py", False),
        ("docs/faults.md", False),
    ],
)
def test_which_files_can_affect_a_fault(file: str, expected: bool) -> None:
    assert can_affect(FAULT, [PurePosixPath(file)]) == expected


def test_a_commit_draws_the_same_quarter_again_and_other_commits_draw_others() -> None:
    names = [fault.name for fault in all_faults()]
    quarters = [{name for name in names if is_in_the_quarter(name, tree)} for tree in ("a", "a", "b")]
    assert quarters[0] == quarters[1] != quarters[2]
    shares = [sum(is_in_the_quarter(name, str(tree)) for name in names) / len(names) for tree in range(40)]
    assert 0.2 < sum(shares) / len(shares) < 0.3


def test_where_git_does_not_say_what_changed_all_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(draw_faults("0" * 40)) == len(all_faults())
    monkeypatch.setattr(drawn_faults, "git", lambda *_: None)
    assert len(draw_faults()) == len(all_faults())
