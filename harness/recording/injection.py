"""Running somebody's command so that its ranks are recorded, and why they may not have been.

PYTHONPATH is all that changes: Python finds the sitecustomize in harness/recording/site before any other, and that one runs the
one it hides.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from harness import ROOT
from harness.core.evidence.lost_peer import is_lost_peer_error
from harness.core.evidence.own_folders import RECORDING_FOLDER, empty_own_folder
from harness.core.evidence.store import EvidenceError

LAUNCH_VARIABLE = "HARNESS_RECORD_LAUNCH"
"""The id of this recording, in the environment of its processes: what each leaves carries it."""
NOISE_VARIABLE = "HARNESS_RECORD_NOISE"
"""Variable: the dtype by one rounding of which the first weights are altered."""
SHARDED_VARIABLE = "HARNESS_RECORD_SHARDED"
"""Variable: what the person who records declares of plain tensors, as JSON."""
ROWS_VARIABLE = "HARNESS_RECORD_ROWS"
"""Variable: the number of blocks of rows of each gradient that are sketched one by one."""
LISTENER_VARIABLE = "HARNESS_RECORD_BY"
"""The module that hears of a process's imports, where it is another than the recorder; in its environment."""
SITE = Path(__file__).resolve().parent / "site"
PROCESSES_FOLDER = "processes"
PROCESS_STATES = ("started", "torch", "called", "failed", "raised", "launcher")
"""How far a process got, in names of files."""


class CommandError(Exception):
    """The command could not be started. The message is for the person who typed it."""


def environment_for_recording(directory: Path, steps: str) -> dict[str, str]:
    """Return the environment in which a command's processes are recorded."""
    python_path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH", ""))))
    own_variables = {"HARNESS_RECORD": str(directory.resolve()), "HARNESS_RECORD_CODE": str(ROOT)}
    return {**os.environ, **own_variables, "HARNESS_RECORD_STEPS": steps, "PYTHONPATH": python_path}


def make_fresh_folder(directory: Path) -> None:
    """Make a recording's folder, empty. Raises EvidenceError for one in which anything is not of a recording."""
    empty_own_folder(directory, RECORDING_FOLDER)
    try:
        (directory / PROCESSES_FOLDER).mkdir(parents=True)
        (directory / "ranks").mkdir()
    except OSError as error:
        raise EvidenceError(f"{directory}: cannot be written: {error.strerror}; choose another -o") from error


def is_recording(directory: Path) -> bool:
    """Return whether ranks of an earlier job left evidence there."""
    return any((directory / "ranks").glob("*.record"))


def run_recorded_command(
    command: Sequence[str],
    directory: Path,
    steps: str,
    *,
    extra_environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    timeout: float | None = None,
    before_exec: Callable[[], None] | None = None,
) -> int:
    """Run the command with `extra_environment`, `before_exec` called in its process, its output in `log` or here.

    Return its exit code, or minus the signal that ended it, which is Ctrl-C's where it failed after one, as torchrun does.
    Raises CommandError if it cannot be started, and TimeoutExpired if it was killed after `timeout` seconds."""
    if missing := missing_script(command):
        raise CommandError(f"{missing}: no such file")
    try:
        with contextlib.ExitStack() as stack:
            output = None if log is None else stack.enter_context(log.open("wb"))
            variables = environment_for_recording(directory, steps) | dict(extra_environment or {})
            process = subprocess.Popen(
                list(command), env=variables, stdout=output, stderr=output, preexec_fn=before_exec
            )
    except OSError as error:
        raise CommandError(
            f"{command[0]}: cannot be run: {error.strerror}{_remedy_beside_python(command[0])}"
        ) from error
    with _forward_signals(process) as interrupted:
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    return -signal.SIGINT if code and interrupted else code


def _remedy_beside_python(command: str) -> str:
    """Return where a command that is not on PATH lies, as a remedy. Empty if it is not in the environment of this Python."""
    executable = Path(sys.executable).parent / command
    is_beside_python = os.sep not in command and shutil.which(command) is None and executable.exists()
    return f"; {executable} is there: name that, or activate its environment" if is_beside_python else ""


@contextlib.contextmanager
def _forward_signals(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass signals on to the job, so that it ends and its page is still written. A terminal's Ctrl-C reaches every process by
    itself, and is only noted. Without a terminal it reached this process alone, and is passed on as other signals are."""
    interrupted: list[int] = []

    def interrupt(number: int, _: object) -> None:
        interrupted.append(number)
        if not has_terminal():
            process.send_signal(number)

    handlers = {signal.SIGINT: interrupt, signal.SIGTERM: lambda number, _: process.send_signal(number)}
    previous_handlers = {}
    if threading.current_thread() is threading.main_thread():
        previous_handlers = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield interrupted
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def missing_script(command: Sequence[str]) -> str:
    """Return the script that Python or torchrun should run, if no such file exists. Modules, and scripts that are run in a
    container or elsewhere, are not looked for."""
    command_words = list(command)
    if not re.fullmatch(r"python[\d.]*|torchrun", os.path.basename(command_words[0])):
        return ""
    is_torch_launcher = command_words[1:3] == ["-m", "torch.distributed.run"]
    arguments = command_words[3:] if is_torch_launcher else command_words[1:]
    script = next((index for index, word in enumerate(arguments) if word.endswith(".py")), None)
    if script is None or {"-m", "-c", "--module"} & set(arguments[:script]):
        return ""
    return "" if os.path.exists(arguments[script]) else arguments[script]


def why_no_evidence(directory: Path, command: Sequence[str], code: int = 0) -> str:
    """Return the likely reason why no rank left evidence, from how far the command's processes got."""
    files = list((directory / PROCESSES_FOLDER).glob("*"))
    states: dict[str, list[Path]] = {}
    for state in PROCESS_STATES:
        states[state] = [file for file in files if file.suffix == f".{state}"]
    if states["failed"]:
        return f"the recorder failed: {states['failed'][0].read_text().strip()[:300]}"
    if code < 0:
        return (
            f"it was ended by {signal.Signals(-code).name} before an optimizer's first step; {_progress_text(states)}"
        )
    if not states["started"]:
        isolating_options = [word for word in command if word in ("-I", "-E", "-S")]
        why = (
            f"`python {isolating_options[0]}` ignores it"
            if isolating_options
            else "python -I, -E or -S, a container, another machine"
        )
        whose_process = "of the command"
        if states["launcher"]:
            if errors := [text for file in states["launcher"] if (text := file.read_text().strip())]:
                return f"the launcher raised before any rank was started: {errors[0]}"
            whose_process = "that the launcher started, if it did start any,"
        return f"no Python process {whose_process} took PYTHONPATH from it ({why}, or a script that sets its own)"
    if not states["torch"]:
        none_imported_torch = f"{_processes_text(states['started'])} ran, and none imported torch"
        if states["raised"] and code:
            return f"{none_imported_torch}; {_most_frequent_error(states['raised'])}"
        return f"{none_imported_torch}; give the command that trains"
    with_torch = {file.stem for file in states["torch"]}
    if raised := [file for file in states["raised"] if file.stem in with_torch] or states["raised"] * bool(code):
        silent = with_torch - {file.stem for file in raised}
        return f"{_processes_text(states['torch'])} imported torch; {_most_frequent_error(raised, len(silent))}"
    if states["called"]:
        return f"{_processes_text(states['called'])} called a model, and none came to an optimizer's step"
    return (
        f"{_processes_text(states['torch'])} imported torch, and in none a module with parameters was called while gradients "
        "were recorded: nothing was trained, or the job ended before its first forward pass"
    )


def _most_frequent_error(raised: Sequence[Path], silent: int = 0) -> str:
    """Return the error that most processes raised, with their number. silent: processes that ended without an error.

    Errors that differ in numbers only (rank, port, process) count together.
    """
    texts = sorted(file.read_text().strip() for file in raised)
    text_by_pattern = {re.sub(r"\d+", "", text): text for text in reversed(texts)}
    errors = Counter(text_by_pattern[re.sub(r"\d+", "", text)] for text in texts)
    error, count = min(errors.most_common(), key=lambda error_and_count: is_lost_peer_error(error_and_count[0]))
    silent_text = f"{silent} ended without an error (sys.exit, or killed: the command's output may say why), then "
    return f"{silent_text * (silent > 0 and is_lost_peer_error(error))}{count} raised before training anything: {error}"


def _progress_text(states: Mapping[str, Sequence[Path]]) -> str:
    """Return how far a command got that a signal ended; the signal gives no reason."""
    if not states["started"]:
        return "no rank's Python process had started"
    if not states["torch"]:
        return f"{_processes_text(states['started'])} had started, and none had imported torch"
    if not states["called"]:
        return f"{_processes_text(states['torch'])} had imported torch"
    return f"{_processes_text(states['called'])} had called a model"


def _processes_text(files: Sequence[Path]) -> str:
    return f"{len(files)} Python process{'' if len(files) == 1 else 'es'}"
