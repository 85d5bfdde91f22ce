"""Nothing is lost where a run is killed, and nothing of two runs is taken for one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from literal import tiny_case, trial_of

from harness import ROOT
from harness.core.case.case import Case, to_json
from harness.core.evidence.store import EvidenceError, evidence_file, load_run, save_run, save_stored
from harness.core.run.folders import make_fresh_folder
from harness.core.run.options import Options
from harness.core.run.reference_cache import FILES, WHOLE, file_state, is_undamaged, link_or_copy
from harness.core.run.sources import digest_of_adapter
from harness.core.run.verdicts import RecordedRun, begin_record, resume_record
from harness.nights.merged import KEYS_THAT_MUST_AGREE, merge_outcomes

CASE = json.dumps(to_json(tiny_case("fsdp_2")))


def written(folder: Path) -> Path:
    """What a run of a case leaves, in short."""
    (folder / "run" / "ranks").mkdir(parents=True)
    for name in ("case.json", "traits.json", "reference.npz", "run/run.json", "run/ranks/rank_00.npz"):
        (folder / name).write_text("{}")
    (folder / "case.json").write_text(CASE)
    return folder


OWN = ROOT / "tests" / "own_trainer.py"


class Killed(BaseException):
    pass


def killed_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is deleted or made next, after so many of these."""
    left = iter(range(steps))

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def does(*args: Any, **kwargs: Any) -> Any:
            if next(left, None) is None:
                raise Killed
            return original(*args, **kwargs)

        return does

    for name in ("unlink", "mkdir"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))


@pytest.mark.parametrize("steps", range(9))
def test_a_folder_is_taken_again_wherever_its_making_was_killed(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "case")
    with monkeypatch.context() as patched:
        killed_after(steps, patched)
        try:
            make_fresh_folder(folder)
        except Killed:
            assert (folder / "case.json").exists() or not any(folder.iterdir())
    assert list(make_fresh_folder(folder).iterdir()) == []


@pytest.mark.parametrize(
    "entries", [(), (".case.json.17.partial",), ("case.json",), ("case.json", ".case.json.9.partial")]
)
def test_a_folder_that_was_only_begun_is_taken(entries: tuple[str, ...], tmp_path: Path) -> None:
    for name in entries:
        (tmp_path / name).write_text("" if "partial" in name else CASE)
    assert list(make_fresh_folder(tmp_path).iterdir()) == []


def test_what_the_harness_did_not_write_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(EvidenceError):
        make_fresh_folder(tmp_path)
    (written(tmp_path / "case") / "run" / "elsewhere").symlink_to(tmp_path)
    with pytest.raises(EvidenceError, match="holds run/elsewhere"):
        make_fresh_folder(tmp_path / "case")
    assert (tmp_path / "thesis.tex").exists()
    assert (tmp_path / "case" / "run" / "run.json").exists()


@pytest.mark.parametrize("name", KEYS_THAT_MUST_AGREE)
def test_shards_that_differ_in_what_they_ran_are_not_merged(name: str) -> None:
    first = RecordedRun("1", Path("a"), dict.fromkeys(KEYS_THAT_MUST_AGREE, "same") | {"cases": {}})
    second = replace(first, run="2", begins=first.begins | {name: "other"})
    assert merge_outcomes([first, replace(first, run="2")]) == []
    with pytest.raises(ValueError, match=name):
        merge_outcomes([first, second])


def test_a_run_is_not_resumed_with_another_adapter(tmp_path: Path) -> None:
    adapter, options = tmp_path / "adapter.py", Options(out=tmp_path / "out", trainer=str(tmp_path / "adapter.py"))
    text = OWN.read_text()
    adapter.write_text(text)
    begin_record([Case("first", "a test")], options, "")
    resume_record([Case("first", "a test")], options, None)
    adapter.write_text(text + "\n")
    with pytest.raises(EvidenceError, match="adapter"):
        resume_record([Case("first", "a test")], options, None)


def test_the_script_beside_an_adapter_is_part_of_it_and_what_the_harness_has_is_no_file(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter.py"
    adapter.write_text("")
    seen = {digest_of_adapter(str(adapter))}
    for text in ("a = 1", "a = 2"):
        (tmp_path / "train.py").write_text(text)
        seen.add(digest_of_adapter(f"{adapter}@elsewhere"))
    assert len(seen) == 3
    assert digest_of_adapter("llama3") == ""


def test_a_rank_of_another_launch_is_not_read_as_one_of_this(tmp_path: Path) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    save_run(replace(trial.run, directory=str(tmp_path), made={"launch": "this"}))
    for rank, launch in ((0, "this"), (1, "another")):
        save_stored(evidence_file(tmp_path, rank), replace(trial.ranks[rank], launch=launch))
    run = load_run(tmp_path)
    assert (list(run.ranks), list(run.unreadable)) == ([0], [1])


def test_a_reference_that_was_damaged_where_it_is_linked_to_is_no_longer_whole(tmp_path: Path) -> None:
    cached = tmp_path / "cached"
    cached.mkdir()
    assert not is_undamaged(cached)
    for name in FILES:
        (cached / name).write_bytes(b"numbers")
    (cached / WHOLE).write_text(json.dumps({name: file_state(cached / name) for name in FILES}))
    assert is_undamaged(cached)
    link_or_copy(cached / FILES[0], tmp_path / "linked.npz")
    assert is_undamaged(cached)
    before = (tmp_path / "linked.npz").stat()
    with open(tmp_path / "linked.npz", "r+b") as file:
        file.write(b"N")
    os.utime(tmp_path / "linked.npz", ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # a clock may be coarse
    assert not is_undamaged(cached)
