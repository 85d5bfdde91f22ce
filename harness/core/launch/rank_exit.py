"""How one rank of a job ended, and where it was: plain data, and what its stack says."""

from __future__ import annotations

import linecache
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.core.evidence.lost_peer import shows_lost_peer
from harness.core.launch.inflight import Issued


@dataclass(frozen=True)
class RankExit:
    """How one rank ended."""

    rank: int
    status: int | None  # exit code, minus the signal, or None if it was not reported
    end_time: float = 0.0
    kill_reason: str = ""  # why we killed it
    failure: dict[str, Any] | None = None  # failures/rank_NN.json
    issued: tuple[Issued, ...] = ()
    stack: str = ""  # stacks/rank_NN.txt
    log: str = ""
    log_tail: str = ""
    launcher_trouble: str = ""  # what happened to the launcher, if something did
    is_stopped: bool = False  # when it was killed: by SIGSTOP, its terminal or a debugger
    surviving_processes: tuple[str, ...] = ()  # the processes that outlived it
    host: str = ""  # its name, where there may be several


class Frame(NamedTuple):
    file: str
    line: int
    function: str


def has_failed(fate: RankExit) -> bool:
    return bool(fate.status) and not fate.kill_reason


def is_winding_up(fate: RankExit) -> bool:
    """Return whether a rank's work was done, and threads that it waited for, or what was to be called at its exit, kept it."""
    return any(frame.function == "wind_up" and LAUNCH_FILES.search(frame.file) for frame in frames_of(fate))


def failure_time(fate: RankExit) -> float:
    return fate.failure["time"] if fate.failure else fate.end_time


LIBRARY_FILES = re.compile(
    r"/(site|dist)-packages/(torch|numpy|torchao)/|/lib/python3\.\d+/(?!(site|dist)-packages/)|^<|/harness/core/probe/"
)
LAUNCH_FILES = re.compile(r"/harness/core/launch/|<frozen|/runpy\.py$")
TRAINER_THREAD_FILE = re.compile(r"/harness/adapters/support/training_function\.py$")
WAITING_FILES = re.compile(r"/torch/distributed/|/torch/autograd/graph\.py$|/torch/nn/parallel/|/torch/cuda/")
WAITING_FUNCTIONS = ("wait", "synchronize")
FRAMES_SHOWN = 8


def frames_of(fate: RankExit) -> list[Frame]:
    """Return the frames of a rank, innermost first: of the exception, or of the main thread when its stack was dumped."""
    if fate.failure:
        return [Frame(*frame) for frame in fate.failure["inside"]]
    return parse_stack(fate.stack)


def parse_stack(text: str) -> list[Frame]:
    """Return the main thread's frames in the last dump of a stacks file, whose first line names that thread.

    If it only waits for a trainer in another thread, return that one's frames."""
    main_thread = re.match(r"main thread (0x[0-9a-f]+)", text)
    frames_by_thread = parse_threads(text)
    stack = frames_by_thread.get(main_thread.group(1), []) if main_thread else []
    if not any(TRAINER_THREAD_FILE.search(frame.file) for frame in stack):
        return stack
    for frames_of_thread in frames_by_thread.values():
        if any(_is_trainer_thread_start(frame) for frame in frames_of_thread):
            return frames_of_thread
    return stack


def _is_trainer_thread_start(frame: Frame) -> bool:
    return bool(TRAINER_THREAD_FILE.search(frame.file)) and frame.function == "_run"


def parse_threads(text: str) -> dict[str, list[Frame]]:
    """Return the frames of each thread in its last dump, by the thread's number."""
    parts = re.split(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*$", text, flags=re.MULTILINE)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    frame = r'File "(.+)", line (\d+) in (.+)'
    frames_by_thread: dict[str, list[Frame]] = {}
    for number, body in bodies.items():
        frames_by_thread[number] = [Frame(file, int(line), name) for file, line, name in re.findall(frame, body)]
    return frames_by_thread


def useful_frames(stack: Sequence[Frame]) -> list[Frame]:
    """Return up to eight frames of the trainer, under the library call it is in; the library's alone without a trainer."""
    stack = [frame for frame in stack if not LAUNCH_FILES.search(frame.file)]
    trainer_frames = [frame for frame in stack if not LIBRARY_FILES.search(frame.file)]
    if not trainer_frames:
        return list(stack[:FRAMES_SHOWN])
    return [*stack[: stack.index(trainer_frames[0])][:1], *trainer_frames[:FRAMES_SHOWN]]


def stack_text(stack: Iterable[Frame]) -> str:
    """Return a line for each frame, `file:line in function`, innermost first; library paths from the package on."""
    return "\n".join(f"{re.sub('.*/(site|dist)-packages/', '', f.file)}:{f.line} in {f.function}" for f in stack)


def is_busy(fate: RankExit) -> bool:
    """Return whether a rank's stacks show that it computes or sleeps in its own code, and so waits for no rank.

    False without a stack."""
    current_calls = calls_in_progress(frames_of(fate))
    calls_of_all_threads: list[Frame] = []
    if not fate.failure:
        for stack in parse_threads(fate.stack).values():
            calls_of_all_threads += calls_in_progress(stack)
    is_in_torch = any("/torch/distributed/" in frame.file for frame in calls_of_all_threads)
    waits = (
        WAITING_FILES.search(frame.file) or frame.function in WAITING_FUNCTIONS or is_waiting_call(frame)
        for frame in current_calls
    )
    return bool(current_calls) and not is_in_torch and not any(waits)


def is_waiting_call(frame: Frame) -> bool:
    """Return whether the line of source is one that waits: torch's Work.wait() is written in C++, and in no stack."""
    return bool(re.search(rf"\.({'|'.join(WAITING_FUNCTIONS)})\(", linecache.getline(frame.file, frame.line)))


def is_in_collective(fate: RankExit) -> bool:
    """Return whether a rank's stack shows that it is in torch.distributed, and so waits for others. False without a stack."""
    return not is_winding_up(fate) and any(
        "/torch/distributed/" in frame.file for frame in calls_in_progress(frames_of(fate))
    )


def calls_in_progress(stack: Sequence[Frame]) -> Sequence[Frame]:
    """Return the calls that a thread is in, innermost first, up to the first one that is not a library's."""
    trainer_frame_numbers = (number for number, frame in enumerate(stack) if not LIBRARY_FILES.search(frame.file))
    return stack[: next(trainer_frame_numbers, len(stack)) + 1]


def last_log_line(fate: RankExit) -> str:
    """Return what C++ writes into the log when it terminates, or the log's last line."""
    lines = [line.strip() for line in fate.log_tail.splitlines() if line.strip()]
    exception_lines = [line for line in lines if line.startswith("what():")]
    return (exception_lines or lines or [""])[-1]


def cpp_exception_text(fate: RankExit) -> str:
    """Return the message of the uncaught C++ exception that ended the rank."""
    words = last_log_line(fate) if fate.status == -signal.SIGABRT else ""
    return words if words.startswith("what():") else ""


TIMEOUT_TEXT = re.compile(r"[Tt]imed ?out|[Tt]imeout")


def has_lost_peer(fate: RankExit) -> bool:
    """Return whether a rank failed because another rank did not answer.

    Also if what it raised was caught and raised again as something else. NCCL's watchdog ends such a rank by SIGABRT.
    """
    if fate.failure:
        links = [(fate.failure["type"], fate.failure["message"]), *fate.failure.get("chain", ())]
        innermost_file = next((frame.file for frame in frames_of(fate)), "")
        return any(shows_lost_peer(*link, within=innermost_file) for link in links)
    watchdog = "Watchdog caught collective operation timeout" in fate.log_tail
    return fate.status == -signal.SIGABRT and (watchdog or shows_lost_peer("", cpp_exception_text(fate)))


def has_timed_out(fate: RankExit) -> bool:
    return has_lost_peer(fate) and bool(TIMEOUT_TEXT.search((fate.failure or {}).get("message", "")))
