"""What is quoted of an exception: the line that tells the cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from harness.recording.ends import error_line


class Broken:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return {"present": index}["absent"]


def told(error: BaseException) -> str:
    return error_line(type(error), error)


def test_what_a_worker_of_a_loader_raised_is_told_and_not_only_that_one_raised() -> None:
    with pytest.raises(KeyError) as raised:
        next(iter(DataLoader(Broken(), num_workers=1)))  # type: ignore[arg-type]
    assert told(raised.value) == "KeyError: Caught KeyError in DataLoader worker process 0: KeyError: 'absent'"


def test_what_a_spawned_process_raised_is_told_though_its_text_begins_with_empty_lines() -> None:
    text = '\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n  File "a"\nOSError: b\n'
    assert told(RuntimeError(text)) == "RuntimeError: -- Process 1 terminated with the following error: OSError: b"


def test_a_line_that_announces_the_next_one_is_followed_by_it() -> None:
    assert told(ValueError("backend='inductor' raised:\nOSError: no compiler\n\nmore")) == (
        "ValueError: backend='inductor' raised: OSError: no compiler"
    )


def test_of_other_texts_the_first_line_that_is_not_empty_is_told() -> None:
    assert told(ValueError("one\ntwo")) == "ValueError: one"
    assert told(AssertionError("\n  one\n  two")) == "AssertionError: one"
    assert told(AssertionError()) == "AssertionError"
    assert told(ValueError("ends with a colon:")) == "ValueError: ends with a colon:"
    assert len(told(ValueError("x" * 1000))) == 300


def test_it_can_be_had_without_torch() -> None:
    code = "import sys, harness.recording.ends; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
