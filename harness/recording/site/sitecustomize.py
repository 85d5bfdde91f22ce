"""Python runs this when it starts in a command that is recorded: once torch is imported, the recorder is installed.

Whatever goes wrong here is said and never ends somebody's training. A sitecustomize of the user's, which this one hides,
runs afterwards.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
AWAITED = ("torch", "torch.distributed.pipelining.schedules", "torch._dynamo.decorators")


class AfterImport(importlib.abc.MetaPathFinder):
    """Finder of modules that calls the recorder as soon as an awaited module has been imported, once for each."""

    def __init__(self) -> None:
        self.awaited = set(AWAITED)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of an awaited module, with a loader that then calls the recorder; None for any other module.

        If the recorder fails, no further module is awaited.
        """
        if name not in self.awaited:
            return None
        self.awaited.discard(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            if not tell_recorder(name):
                self.awaited.clear()

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


def tell_recorder(name: str) -> bool:
    """Return whether the recorder was installed for this module, which has just been imported. Never raises.

    If not, the reason is written to the recording and to stderr. A process that is recorded as a lone rank then exits.
    """
    try:
        if os.environ["HARNESS_RECORD_CODE"] not in sys.path:
            sys.path.append(os.environ["HARNESS_RECORD_CODE"])
        module_name = os.environ.get("HARNESS_RECORD_BY", "harness.recording.entry")
        importlib.import_module(module_name).imported(name)
        note_state("torch")
        return True
    except Exception as error:
        why = str(error) if isinstance(error, ImportError) else repr(error)
        note_state("failed", why)
        print(f"harness: this process is not recorded: {why}", file=sys.stderr)
        if "HARNESS_RECORD_ALONE" in os.environ:  # of a world that is not there it would wait for ever
            exit_as_unable(f"the recorder could not be installed in it: {why}")
        return False


def note_state(state: str, text: str = "") -> None:
    """Write a file in the recording with the state that this process reached, for the case that no rank leaves
    evidence.

    Its content is the text and the process' command line.
    """
    write_state(state, " ".join([text, *sys.orig_argv]))


def write_state(state: str, text: str) -> None:
    """Write a file in the recording's folder whose suffix is the state that this process reached.

    An OSError goes to stderr.
    """
    folder = os.path.join(os.environ["HARNESS_RECORD"], "processes")
    try:
        with open(os.path.join(folder, f"{os.uname().nodename}-{os.getpid()}.{state}"), "w") as file:
            file.write(text)
    except OSError as error:
        print(f"harness: {folder} cannot be written: {error}", file=sys.stderr)


def first_line(kind: type[BaseException], error: BaseException) -> str:
    return f"{kind.__name__}: {error}".splitlines()[0][:300]


def record_errors() -> None:
    """Install an excepthook that records errors raised before torch is imported. Later ones are the recorder's."""
    hook = sys.excepthook

    def note_raised(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if "torch" not in sys.modules:
            write_state("raised", first_line(kind, error))
        hook(kind, error, trace)

    sys.excepthook = note_raised


def record_rank_ends() -> None:
    """Install an excepthook in torch's launcher that records how its ranks ended, if not well, or the launcher's own error."""
    hook = sys.excepthook

    def note_raised(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if kind.__name__ == "ChildFailedError":
            note_ends({rank: failure.exitcode for rank, failure in getattr(error, "failures", {}).items()})
        else:
            write_state("launcher", first_line(kind, error))
        hook(kind, error, trace)

    sys.excepthook = note_raised


def note_ends(codes: dict[int, int]) -> None:
    """Write how a launcher's ranks ended. codes: by rank, its exit code or minus the signal.

    An OSError goes to stderr.
    """
    file = os.path.join(os.environ["HARNESS_RECORD"], "processes", f"{os.uname().nodename}-{os.getpid()}.ends")
    try:
        with open(file, "w") as opened_file:
            json.dump(codes, opened_file)
    except OSError as error:
        print(f"harness: {file} cannot be written: {error}", file=sys.stderr)


def exit_as_unable(reason: str) -> None:
    """Write why this rank cannot be recorded, and exit with code 1 without cleanup."""
    file = os.path.join(os.environ["HARNESS_RECORD"], "processes", f"rank_{int(os.environ['RANK']):05d}.unable")
    with open(file, "w") as opened_file:
        opened_file.write(reason)
    sys.stderr.flush()
    os._exit(1)


def run_hidden_sitecustomize() -> None:
    """Run the sitecustomize that Python would have found without ours, if there is one."""
    other_folders = [folder for folder in sys.path if os.path.abspath(folder or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", other_folders)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def launches_ranks() -> bool:
    """Return whether this process is torchrun or another launcher, which import torch and train nothing."""
    words = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed", "fabric")
    return "RANK" not in os.environ and any(os.path.basename(word) in words for word in sys.orig_argv[:4])


if os.environ.get("HARNESS_RECORD"):
    if launches_ranks():
        write_state("launcher", "")
        record_rank_ends()
    else:
        note_state("started")
        record_errors()
        sys.meta_path.insert(0, AfterImport())
    run_hidden_sitecustomize()
