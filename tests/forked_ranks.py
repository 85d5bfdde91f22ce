"""The process that forks the ranks of forked_jobs, and what a rank does in it. Only what PRELOAD names is imported there."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from harness.core.launch.process import die_with_parent
from harness.core.launch.rank import exit_code
from harness.core.launch.server import Server, import_once

SITECUSTOMIZE = Path(__file__).parents[1] / "harness" / "recording" / "site" / "sitecustomize.py"
PRELOAD = ("torch", "harness.recording.entry", "harness.recording.recorder")
"""What a recorded process has imported once it has imported torch. More would be there before the recorder is."""


def serve(requests: int, reports: int) -> None:
    parent = os.getppid()
    import_once(PRELOAD)
    ours = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [path for path in sys.path if path and path not in ours]
    JobServer(requests, reports, alive=lambda: os.getppid() == parent).serve(ready=0.0)


class JobServer(Server):
    def become_rank(self, path: Path, rank: int, server: int) -> NoReturn:
        leave = os._exit  # the recorder puts another in its place
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            die_with_parent(server)
            for fd in self.private_descriptors:
                os.close(fd)
            code = run_rank(json.loads(path.read_text()), rank)
        finally:
            leave(code)


def run_rank(job: dict[str, Any], rank: int) -> int:
    """Run the script as this rank, and return its exit code. What the interpreter does as it ends is done here."""
    become_process(job, rank)
    start_recorder()
    code = 0
    try:
        run_script(job)
    except SystemExit as error:
        code = exit_code(error)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        code = 1
        sys.last_type = type(error)
        sys.last_value = error
        sys.last_traceback = error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def become_process(job: dict[str, Any], rank: int) -> None:
    """Have what a process has that was started by itself: its output, environment, folder, arguments and random numbers."""
    os.dup2(os.open(job["stdout"], os.O_WRONLY | os.O_APPEND), 1)
    os.dup2(os.open(job["stderr"], os.O_WRONLY | os.O_APPEND), 2)
    os.environ.clear()
    os.environ.update(job["environment"])
    if job["port"]:
        os.environ.update(torchrun_environment(job, rank))
    os.chdir(job["folder"])
    sys.argv = list(job["arguments"])
    sys.orig_argv = [sys.executable, *sys.argv]
    paths = job["environment"]["PYTHONPATH"].split(os.pathsep)
    folder = "" if job["code"] is not None else os.path.dirname(os.path.abspath(sys.argv[0]))
    sys.path[:] = [folder, *paths, *sys.path]
    atexit._clear()
    sys.modules["torch"].set_num_threads(1)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def torchrun_environment(job: dict[str, Any], rank: int) -> dict[str, str]:
    alike = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1"}
    counts = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), job["ranks"])
    numbers = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank)
    elastic = {"RESTART_COUNT": 0, "MAX_RESTARTS": 0, "RUN_ID": job["run"], "USE_AGENT_STORE": True}
    told = alike | counts | numbers | {f"TORCHELASTIC_{name}": value for name, value in elastic.items()}
    return {name: str(value) for name, value in told.items()} | {
        "MASTER_PORT": str(job["port"]),
        "OMP_NUM_THREADS": "1",
    }


def start_recorder() -> None:
    """Do what Python does as it starts in a recorded command, and then what importing torch does there."""
    spec = importlib.util.spec_from_file_location("sitecustomize", SITECUSTOMIZE)
    assert spec is not None and spec.loader is not None
    site: Any = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = site
    spec.loader.exec_module(site)
    finder: Any = sys.meta_path[0]
    for name in [name for name in site.AWAITED if name in sys.modules]:
        finder.awaited.discard(name)
        if not site.tell_recorder(name):
            finder.awaited.clear()


def run_script(job: dict[str, Any]) -> None:
    """In __main__, as Python does: processes that it starts, and what it pickles, look there."""
    space = sys.modules["__main__"].__dict__
    space.clear()
    space.update(__name__="__main__", __builtins__=__builtins__, __spec__=None, __doc__=None)
    if job["code"] is not None:
        exec(compile(job["code"], "<string>", "exec"), space)
        return
    script = os.path.abspath(sys.argv[0])
    space["__file__"] = script
    exec(compile(Path(script).read_bytes(), script, "exec"), space)
