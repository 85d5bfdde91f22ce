"""What changed from one version of a Python file to another."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.core.case.case import CaseError
from harness.nights.affected.sources import changes_between, compare_sources

BEFORE = """
import os
LIMIT = 3
def f(a, b=1):
    "Says something."
    return a + b
class C:
    rate: float = 0.1
    def m(self):
        def inner():
            return 1
        return inner()
    def other(self):
        return LIMIT
@triton.autotune(configs=[])
@triton.jit
def kernel(l):
    return l + 1
"""


@pytest.mark.parametrize(
    ("old", "new", "functions", "at_import"),
    [
        ("return a + b", "return a - b", {"f"}, False),
        ("return a + b", "# by hand\n    return  a + b", set(), False),
        ("Says something.", "Says something else.", set(), False),
        ("            return 1", "            return 2", {"C.m"}, False),
        ("b=1", "b=2", set(), True),
        ("LIMIT = 3", "LIMIT = 4", set(), True),
        ("rate: float = 0.1", "rate: float = 0.2", set(), True),
        ("import os", "import sys", set(), True),
        ("class C:", "@register\nclass C:", set(), True),
        ("class C:", "def helper():\n    return 0\nclass C:", set(), False),
        ("class C:", "def LIMIT():\n    return 0\nclass C:", set(), True),
        ("    def other(self):", "    def extra(self):\n        return 0\n    def other(self):", set(), True),
        ("def f(a, b=1):", "def g(a, b=1):", set(), True),
        ("return LIMIT", "return (", set(), True),
        ("return l + 1", "return l + 2", set(), True),
    ],
)
def test_bodies_of_functions_are_told_from_what_runs_at_import(
    old: str, new: str, functions: set[str], at_import: bool
) -> None:
    assert old in BEFORE
    changed, why = compare_sources(BEFORE, BEFORE.replace(old, new))
    assert changed == functions
    assert bool(why) is at_import


def test_a_new_function_counts_if_its_name_was_mentioned_before() -> None:
    new = BEFORE.replace("class C:", "def helper():\n    return 0\nclass C:")
    assert compare_sources(BEFORE, new, {"other"}.__contains__) == (set(), "")
    assert compare_sources(BEFORE, new, {"helper"}.__contains__)[1]


def commit(folder: Path, **files: str | None) -> str:
    """Return the commit with these files, by name with "__" for a dot; None deletes one."""
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        path.unlink() if text is None else path.write_text(text, encoding="utf-8")
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "x", "--allow-empty"], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_files_of_two_commits_and_those_that_are_there_now(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    first = commit(tmp_path, a__py=BEFORE, gone__py="", table__json="1", README__md="x")
    second = commit(tmp_path, a__py=BEFORE.replace("a + b", "a - b"), gone__py=None, table__json="2", README__md="y")
    found = changes_between(tmp_path, first, second)
    assert (found.functions, found.whole_files) == ({"a.py": {"f"}}, {})
    assert (found.other_files, found.new_files, found.gone_files) == ({"table.json"}, set(), {"gone.py"})
    third = commit(tmp_path, b__py="try:\n    from a import fast\nexcept ImportError:\n    fast = None")
    for name, counts in (("fast", True), ("fas", False)):
        helper = BEFORE.replace("class C:", f"def {name}():\n    return 0\nclass C:")
        assert bool(changes_between(tmp_path, third, commit(tmp_path, a__py=helper)).whole_files) is counts
    subprocess.run(["git", "-C", str(tmp_path), "reset", "--quiet", "--hard", second], check=True)
    (tmp_path / "new.py").write_text("", encoding="utf-8")
    (tmp_path / "a.py").write_text("LIMIT = 3", encoding="utf-8")
    found = changes_between(tmp_path, second, None)
    assert (set(found.whole_files), found.new_files, found.other_files) == ({"a.py"}, {"new.py"}, set())
    with pytest.raises(CaseError, match="no-such"):
        changes_between(tmp_path, "no-such", None)


@pytest.mark.parametrize("new", ["b.py", None])
def test_a_link_that_leads_elsewhere_or_is_gone_counts_for_all_for_a_rank_imports_what_it_led_to(
    new: str | None, tmp_path: Path
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "link.py").symlink_to("a.py")
    first = commit(tmp_path, a__py=BEFORE, b__py=BEFORE)
    (tmp_path / "link.py").unlink()
    if new:
        (tmp_path / "link.py").symlink_to(new)
    for found in (changes_between(tmp_path, first, None), changes_between(tmp_path, first, commit(tmp_path))):
        assert (found.other_files, found.python_files) == ({"link.py"}, set())
    changed = changes_between(tmp_path, first, commit(tmp_path, a__py=BEFORE.replace("a + b", "a - b")))
    assert changed.functions == {"a.py": {"f"}}  # what was imported through the link is recorded as that file


def test_a_sparse_checkout_has_the_rest_in_gits_index(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    first = commit(tmp_path, a__py=BEFORE, b__py="")
    commit(tmp_path, a__py=BEFORE.replace("a + b", "a - b"))
    subprocess.run(["git", "-C", str(tmp_path), "sparse-checkout", "set", "--no-cone", "/b.py"], check=True)
    assert not (tmp_path / "a.py").exists()
    found = changes_between(tmp_path, first, None)
    assert (found.functions, found.gone_files) == ({"a.py": {"f"}}, set())
