"""What `-k` takes, and what it refuses as no expression."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.case.case import CaseError
from harness.core.cli import main
from harness.core.run.selection import matches_expression

WRONG = (
    *("hsdp (2x2)", "(hsdp)(tp)", "hsdp tp", "()", "hsdp()", "hsdp and", "and", "not", ")", "((", "a not b"),
    *("(a)not b", "a and ()", "[hsdp]", "a.b", "a == b", "(" * 500, "(" * 5000 + "a" + ")" * 5000),
)


@pytest.mark.parametrize("expression", WRONG)
def test_what_is_no_expression_is_refused(expression: str) -> None:
    with pytest.raises(CaseError):
        matches_expression(expression, "hsdp_2x2")


@pytest.mark.parametrize(
    ("expression", "held"),
    [("", True), ("HSDP", True), ("hsdp and not tp", True), ("not (hsdp or tp)", False), ("((2x2))", True)],
)
def test_words_are_joined(expression: str, held: bool) -> None:
    assert matches_expression(expression, "hsdp_2x2") == held


@pytest.mark.parametrize("words", ["matrix --list", "golden", "doctor --trainer llama3", "faults --list"])
def test_each_command_with_k_refuses_it(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split(), "-k", "hsdp (2x2)"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_loop_of_links_is_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").symlink_to("a.yaml")
    (tmp_path / "b.yaml").mkdir()
    assert main(["matrix", "--list", "--cases", str(tmp_path)]) == 2
    (tmp_path / "a.yaml").unlink()
    assert main(["matrix", "--list", "--cases", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
