"""Which functions run in a process, seen from inside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.nights.mapping import record_imports

MODULE = """
import threading

def called():
    return [helper() for _ in range(2)]

def helper():
    return (lambda: 1)()

def on_a_thread():
    return 2

def idle():
    return 3

class C:
    def m(self):
        def inner():
            return 4
        return inner()
"""
MAIN = """
import json, sys
from pathlib import Path
sys.path[:0] = [{harness!r}, {root!r}]
from harness.nights.affected.recorder import FunctionRecorder
recorder = FunctionRecorder(Path({root!r}))
recorder.start()
import mine
{body}
print(json.dumps(recorder.stop()))
"""
HARNESS = str(Path(__file__).resolve().parents[3])


def seen(root: Path, body: str) -> dict[str, Any]:
    (root / "mine.py").write_text(MODULE, encoding="utf-8")
    script = MAIN.format(harness=HARNESS, root=str(root), body=body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_functions_of_all_threads_are_seen_by_the_outermost_name(tmp_path: Path) -> None:
    body = "mine.called(); mine.C().m(); t = mine.threading.Thread(target=mine.on_a_thread); t.start(); t.join()"
    found = seen(tmp_path, body)
    assert found["imported"] == ["mine.py"]
    assert {*found["functions"]["mine.py"]} >= {"called", "helper", "on_a_thread", "C.m"}
    assert "idle" not in found["functions"]["mine.py"]
    assert found["lost"] == ""


def test_a_script_that_ran_counts_as_imported_and_what_was_imported_before_is_told(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("x = 1", encoding="utf-8")
    for path in (str(tmp_path / "script.py"), "script.py"):
        body = f"import os, runpy\nos.chdir({str(tmp_path)!r})\nrunpy.run_path({path!r})"
        assert seen(tmp_path, body)["imported"] == ["mine.py", "script.py"]
    again = "recorder.stop()\nrecorder = FunctionRecorder(Path(recorder.root))\nrecorder.start()"
    assert (seen(tmp_path, "")["earlier"], seen(tmp_path, again)["earlier"]) == ({}, {"mine": "mine.py"})


@pytest.mark.parametrize(
    ("command", "shell"), [("['true']", False), ("'true', shell=True", True), ("['bash', '-c', 'true']", True)]
)
def test_a_shell_is_told_from_a_program(tmp_path: Path, command: str, shell: bool) -> None:
    found = seen(tmp_path, f"import subprocess\nsubprocess.run({command})")
    assert (found["shell"], found["lost"]) == (shell, "")


@pytest.mark.parametrize(
    "body",
    [
        "import os\nif not os.fork(): os._exit(0)",
        "import subprocess\nsubprocess.run([sys.executable, '-c', ''])",
        "import multiprocessing\np = multiprocessing.get_context('spawn').Process(target=print)\np.start(); p.join()",
    ],
)
def test_what_runs_in_other_processes_is_known_to_be_missing(tmp_path: Path, body: str) -> None:
    assert seen(tmp_path, body)["lost"]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the interpreter's monitoring is not displaced by a profiler")
def test_a_profiler_of_the_trainers_own_is_told(tmp_path: Path) -> None:
    assert "profiler" in seen(tmp_path, "import cProfile\np = cProfile.Profile(); p.enable(); p.disable()")["lost"]


def test_what_runs_while_the_rank_server_imports_is_seen_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(f"{MODULE}\ncalled()\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = record_imports(tmp_path, (("__main__", "server.py"), ("mine", "mine.py")))
    assert {*found["functions"]["mine.py"]} >= {"called", "helper"}
    assert found["earlier"] == {"__main__": "server.py"}
    assert "idle" not in found["functions"]["mine.py"]
    gone = record_imports(tmp_path, (("no_such_module", "no_such_module.py"),))
    assert (gone["functions"], gone["earlier"]) == ({}, {"no_such_module": "no_such_module.py"})


@pytest.mark.slow(
    "imports torch's compiler twice; test_a_profiler_of_the_trainers_own_is_told records what is not compiled"
)
def test_what_is_compiled_is_known_to_be_missing(tmp_path: Path) -> None:
    body = "import torch\ntorch.compile(mine.idle, backend='eager')()"
    assert "compiled code" in seen(tmp_path, body)["lost"]
    assert seen(tmp_path, "import torch._dynamo")["lost"] == ""
