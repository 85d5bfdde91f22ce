"""NAME@SOURCE, taken apart in one place."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core import trainers
from harness.core.case.trainer_spec import TrainerSpec


@pytest.mark.parametrize(
    ("text", "name", "source"),
    [
        ("llama3", "llama3", ""),
        ("torchtitan@/srv/torchtitan", "torchtitan", "/srv/torchtitan"),
        ("torchtitan@/home/me@work/torchtitan.py", "torchtitan", "/home/me@work/torchtitan.py"),
        ("/home/me/mine.py", "/home/me/mine.py", ""),
        ("/home/me@work/mine.py", "/home/me@work/mine.py", ""),
        ("/home/me@work/mine.py@/srv/mine", "/home/me@work/mine.py", "/srv/mine"),
        ("no such name", "no such name", ""),
        ("", "", ""),
    ],
)
def test_a_trainer_is_a_name_or_a_file_and_may_have_a_source(text: str, name: str, source: str) -> None:
    assert TrainerSpec.parse(text) == TrainerSpec(name, source)
    assert str(TrainerSpec.parse(text)) == text


def test_a_trainer_in_a_folder_with_an_at_sign_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "me@work" / "mine.py"
    file.parent.mkdir()
    file.write_text("from harness.core.trainers.llama3 import adapter\n")
    assert trainers.load_adapter(trainers.absolute_spec(str(file), None)).name == "llama3"
