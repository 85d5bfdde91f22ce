"""A recorder of the functions of a repository that run in this process.

It needs the standard library alone, and starts in a rank before the trainer does.
"""

from __future__ import annotations

import cProfile
import importlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

TOOL_ID = 4  # of sys.monitoring's six; the library names 0, 1, 2 and 5
PROCESS_START_EVENTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
SHELLS = ("sh", "bash", "zsh", "make", "env", "xargs")
PROCESS_MODULES = (
    "multiprocessing.popen_fork",
    "multiprocessing.popen_spawn_posix",
    "multiprocessing.popen_forkserver",
)
"""The modules that are imported once a process of multiprocessing starts."""


class FunctionRecorder:
    """A recorder of the Python functions of a repository that are called, on any thread, from `start` to `stop`.

    From Python 3.12 on, sys.monitoring reports a function once. Before, cProfile counts the calls of each of Python's
    threads.
    """

    def __init__(self, root: Path) -> None:
        """root: of the repository; what lies elsewhere is left out."""
        self.root = os.path.realpath(root)
        self.codes: set[CodeType] = set()
        self.profiles: list[cProfile.Profile] = []  # one a thread
        self.lost = ""  # why some functions may be missing
        self.shell = False  # whether a shell ran, or what may be a script
        self.is_on = self.is_own_profile = False
        self.earlier_modules: dict[str, str] = {}
        """Modules that are imported already, with their files: what ran of them is not known."""
        self.process_modules_before = {name for name in PROCESS_MODULES if name in sys.modules}

    def start(self) -> None:
        """Record calls from here on. Functions that are running now count as called.

        Adds an audit hook, which cannot be removed.
        """
        self.earlier_modules = dict(imported_modules(self.root))
        self._add_callers(sys._getframe())
        if sys.version_info >= (3, 12):
            self._start_monitoring()
        else:
            threading.setprofile(self._record_new_thread)
            self._start_profile()
        self.is_on = True
        sys.addaudithook(self._handle_audit_event)  # it can never be removed, so it looks whether we are on

    def _start_monitoring(self) -> None:
        """Have sys.monitoring report each function when it starts for the first time. Takes the tool id TOOL_ID."""
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]

        def record_call(code: CodeType, _: int) -> Any:
            self.codes.add(code)
            return monitoring.DISABLE

        monitoring.use_tool_id(TOOL_ID, "harness")
        monitoring.register_callback(TOOL_ID, monitoring.events.PY_START, record_call)
        monitoring.set_events(TOOL_ID, monitoring.events.PY_START)

    def _add_callers(self, frame: FrameType | None) -> None:
        """Add the code of a frame and of all its callers to the recorded codes. None adds nothing."""
        while frame:
            self.codes.add(frame.f_code)
            frame = frame.f_back

    def _start_profile(self) -> None:
        """Start a cProfile of this thread.

        `is_own_profile` is true meanwhile: the audit hook must not take it for the trainer's.
        """
        self.profiles.append(cProfile.Profile())
        self.is_own_profile = True
        self.profiles[-1].enable(subcalls=False, builtins=False)
        self.is_own_profile = False

    def _record_new_thread(self, frame: FrameType, *_: Any) -> None:
        """Add the functions that run on a new thread already, and profile it from here on if recording is on."""
        self._add_callers(frame)
        if self.is_on:
            self._start_profile()

    def _handle_audit_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Set `lost` at an event after which functions may run unseen, and `shell` when a shell or a script starts.

        Does nothing unless recording is on.
        """
        if not self.is_on:
            return
        if event == "sys.setprofile" and sys.version_info < (3, 12):
            if self.is_own_profile or sys._getframe(1).f_globals.get("__name__") == "threading":
                return  # a thread that begins
            self.lost = self.lost or "the trainer set a profiler of its own"
        elif event == "os.fork":
            self.lost = self.lost or "the trainer forked a process"
        elif event in PROCESS_START_EVENTS:
            self.shell = self.shell or not _starts_plain_program(event, arguments)
            if "python" in str(arguments[0]):
                self.lost = self.lost or "the trainer started another Python"

    def stop(self) -> dict[str, Any]:
        """Stop recording. Return a record that can be written as JSON; files are relative to the root.

            "functions"  {file: names of the functions that were called}
            "imported"   files that were imported, or run as a script
            "earlier"    {module: file} of what was imported before `start`
            "lost"       why functions may be missing; empty if none are
            "shell"      whether a shell or a script was started

        A function within another, or a lambda, counts as the outermost one around it.
        """
        self.is_on = False
        if sys.version_info >= (3, 12):
            sys.monitoring.set_events(TOOL_ID, 0)  # type: ignore[attr-defined, unused-ignore]
            sys.monitoring.free_tool_id(TOOL_ID)  # type: ignore[attr-defined, unused-ignore]
        else:
            threading.setprofile(None)
            for frame in sys._current_frames().values():  # a profile has what returned
                self._add_callers(frame)
            self.profiles[0].disable()
            for profile in self.profiles:
                self.codes |= {entry.code for entry in profile.getstats() if isinstance(entry.code, CodeType)}
        if {name for name in PROCESS_MODULES if name in sys.modules} - self.process_modules_before:
            self.lost = self.lost or "the trainer started a process"
        if getattr(sys.modules.get("torch._dynamo.utils"), "counters", {}).get("frames"):
            self.lost = self.lost or "compiled code calls functions that are not seen"
        functions: dict[str, set[str]] = {}
        for code in tuple(self.codes):
            if file := _path_below(code.co_filename, self.root):
                functions.setdefault(file, set()).add(code.co_qualname.partition(".<locals>")[0])
        names_by_file = {file: sorted(names - {"<module>"}) for file, names in sorted(functions.items())}
        return {
            "functions": {file: names for file, names in names_by_file.items() if names},
            "imported": sorted({*dict(imported_modules(self.root)).values(), *names_by_file}),
            "earlier": self.earlier_modules,
            "lost": self.lost,
            "shell": self.shell,
        }


def imported_modules(root: str) -> Iterator[tuple[str, str]]:
    """Yield (name, file) of this process's modules whose files lie below `root`. The file is relative to it.

    root: without symbolic links.
    """
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and (inside := _path_below(file, root)):
            yield name, inside


def _path_below(file: str, root: str) -> str:
    """Return the path of a file relative to the root. Empty for one that is not below it, and for code without a file."""
    real = "" if file.startswith("<") else os.path.realpath(file)  # "<string>"; a script's may be relative
    return os.path.relpath(real, root) if real.startswith(root + os.sep) else ""


def _starts_plain_program(event: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether a program starts that is neither a shell nor a script."""
    program = os.path.basename(str(arguments[0]))
    return event != "os.system" and program not in SHELLS and not program.endswith(".sh")


def main(root: str, modules: list[str]) -> None:
    """Import the modules, and print as a line of JSON what a recorder records meanwhile."""
    recorder = FunctionRecorder(Path(root))
    recorder.start()
    for name in modules:
        importlib.import_module(name)
    print("\n" + json.dumps(recorder.stop()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
