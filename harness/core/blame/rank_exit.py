"""How one rank of a job ended, and where it was: plain data, and what its stack says."""

from __future__ import annotations

import linecache
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.core.blame.calls import Issued
from harness.core.evidence.lost_peer import RaisedIn, shows_lost_peer


@dataclass(frozen=True)
class RankExit:
    """How one rank ended and what it issued, as far as a run, a recording or a dump shows it."""

    rank: int
    """Global rank."""
    status: int | None
    """Exit code, or minus the signal; None if it was not reported."""
    end_time: float = 0.0
    """When it ended, in seconds since 1970."""
    kill_reason: str = ""
    """Why it was killed from outside, for no fault of its own; empty if it was not."""
    failure: dict[str, Any] | None = None
    """What it raised, as failures/rank_NN.json has it; None if nothing is on record."""
    issued: tuple[Issued, ...] = ()
    """Calls on record, the oldest first."""
    stack: str = ""
    """Stacks of its threads, as stacks/rank_NN.txt has them; empty if none were taken."""
    log: str = ""
    """Path of its log."""
    log_tail: str = ""
    """Last characters of its log."""
    launcher_trouble: str = ""
    """What happened to the launcher; empty if nothing did."""
    is_stopped: bool = False
    """Whether it was stopped by SIGSTOP, its terminal or a debugger when it was killed."""
    surviving_processes: tuple[str, ...] = ()
    """Command lines of the processes that outlived it."""
    host: str = ""
    """Name of its machine, where there may be several."""
    counts: Mapping[str, int | None] = field(default_factory=dict)
    """Name of a group without calls on record -> the position of the last collective over it; None if it is not known."""
    is_complete: bool = True
    """Whether it issued nothing over groups that are neither in `issued` nor in `counts`."""
    is_timed: bool = True
    """Whether it is on record when it ended and when it issued its calls."""
    is_vanished: bool = False
    """Whether it left no word of its end, which a process does that ends by itself."""

    def unlisted_count(self, group: str) -> int | None:
        """Return the position of its last collective over a group, by name, of which no call is on record.

        -1 if it issued none, None if it is not known.
        """
        return self.counts.get(group, -1 if self.is_complete else None)


class Frame(NamedTuple):
    file: str
    line: int
    function: str


def has_failed(rank_exit: RankExit) -> bool:
    return bool(rank_exit.status) and not rank_exit.kill_reason


def is_winding_up(rank_exit: RankExit) -> bool:
    """Return whether a rank's work was done, and threads that it waited for, or what was to be called at its exit, kept it."""
    return any(frame.function == "wind_up" and LAUNCH_FILES.search(frame.file) for frame in frames_of(rank_exit))


def failure_time(rank_exit: RankExit) -> float:
    return rank_exit.failure["time"] if rank_exit.failure else rank_exit.end_time


LIBRARY_FILES = re.compile(
    r"/(site|dist)-packages/(torch|numpy|torchao)/|/lib/python3\.\d+/(?!(site|dist)-packages/)|^<|/harness/core/probe/"
)
LAUNCH_FILES = re.compile(r"/harness/core/launch/|<frozen|/runpy\.py$")
TRAINER_THREAD_FILE = re.compile(r"/harness/adapters/support/training_function\.py$")
COLLECTIVE_FILES = re.compile(
    r"/torch/distributed/(?!tensor/|_tensor/|fsdp/|_composable/|pipelining/|optim/|algorithms/|checkpoint/|utils\.py)"
)
"""Files of torch.distributed in which a rank waits for others. The others compute, and call these for a collective."""
WAITING_FILES = re.compile(rf"{COLLECTIVE_FILES.pattern}|/torch/autograd/graph\.py$|/torch/nn/parallel/|/torch/cuda/")
WAITING_FUNCTIONS = ("wait", "wait_tensor", "synchronize")
FRAMES_SHOWN = 8


def frames_of(rank_exit: RankExit) -> list[Frame]:
    """Return the frames of a rank, innermost first: of the exception, or of the main thread when its stack was dumped."""
    if rank_exit.failure:
        return [Frame(*frame) for frame in rank_exit.failure["inside"]]
    return parse_stack(rank_exit.stack)


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


def is_busy(rank_exit: RankExit) -> bool:
    """Return whether a rank's stacks show that it computes or sleeps in its own code, and so waits for no rank.

    Frames of DTensor or FSDP are computing unless a collective is below them. False without a stack.
    """
    current_calls = calls_in_progress(frames_of(rank_exit))
    calls_of_all_threads: list[Frame] = []
    if not rank_exit.failure:
        for stack in parse_threads(rank_exit.stack).values():
            calls_of_all_threads += calls_in_progress(stack)
    is_any_thread_waiting = any(map(_is_in_collective_call, calls_of_all_threads))
    waits = (
        WAITING_FILES.search(frame.file) or frame.function in WAITING_FUNCTIONS or is_waiting_call(frame)
        for frame in current_calls
    )
    return bool(current_calls) and not is_any_thread_waiting and not any(waits)


def _is_in_collective_call(frame: Frame) -> bool:
    """Return whether a frame is in a collective's code, or in a line of torch.distributed that waits for one."""
    if COLLECTIVE_FILES.search(frame.file):
        return True
    return "/torch/distributed/" in frame.file and is_waiting_call(frame)


def is_waiting_call(frame: Frame) -> bool:
    """Return whether the line of source is one that waits: torch's Work.wait() is written in C++, and in no stack."""
    return bool(re.search(rf"\.({'|'.join(WAITING_FUNCTIONS)})\(", linecache.getline(frame.file, frame.line)))


def is_in_collective(rank_exit: RankExit) -> bool:
    """Return whether a rank's stack shows that it is in a collective, and so waits for others. False without a stack."""
    current_calls = calls_in_progress(frames_of(rank_exit))
    return not is_winding_up(rank_exit) and any(map(_is_in_collective_call, current_calls))


def calls_in_progress(stack: Sequence[Frame]) -> Sequence[Frame]:
    """Return the calls that a thread is in, innermost first, up to the first one that is not a library's."""
    trainer_frame_numbers = (number for number, frame in enumerate(stack) if not LIBRARY_FILES.search(frame.file))
    return stack[: next(trainer_frame_numbers, len(stack)) + 1]


def last_log_line(rank_exit: RankExit) -> str:
    """Return what C++ writes into the log when it terminates, or the log's last line."""
    lines = [line.strip() for line in rank_exit.log_tail.splitlines() if line.strip()]
    exception_lines = [line for line in lines if line.startswith("what():")]
    return (exception_lines or lines or [""])[-1]


def cpp_exception_text(rank_exit: RankExit) -> str:
    """Return the message of the uncaught C++ exception that ended the rank."""
    words = last_log_line(rank_exit) if rank_exit.status == -signal.SIGABRT else ""
    return words if words.startswith("what():") else ""


TIMEOUT_TEXT = re.compile(r"[Tt]imed ?out|[Tt]imeout")


def has_lost_peer(rank_exit: RankExit) -> bool:
    """Return whether a rank failed because another rank did not answer.

    Also if what it raised was caught and raised again as something else. NCCL's watchdog ends such a rank by SIGABRT.
    """
    failure = rank_exit.failure
    if not failure:
        watchdog = "Watchdog caught collective operation timeout" in rank_exit.log_tail
        is_abort = rank_exit.status == -signal.SIGABRT
        return is_abort and (watchdog or shows_lost_peer("RuntimeError", cpp_exception_text(rank_exit)))
    raised = (failure["type"], failure["message"])
    first_cause = tuple(failure.get("cause") or raised)
    if shows_lost_peer(*first_cause, raised_in=code_that_raised(frames_of(rank_exit))):
        return True
    links = [raised, *map(tuple, failure.get("chain", ()))]
    return any(shows_lost_peer(*link) for link in links if link != first_cause)


def code_that_raised(stack: Sequence[Frame]) -> RaisedIn:
    """Return the code that raised an exception, by its frames, innermost first.

    C++ has no frames: the innermost one is the line that called it, which is no raise statement.
    """
    if not stack:
        return RaisedIn.UNKNOWN
    current_calls = calls_in_progress(stack)
    is_in_backward = stack[0].file.endswith("/torch/autograd/graph.py")
    if is_in_backward or any(map(_is_in_collective_call, current_calls)) or is_waiting_call(stack[0]):
        return RaisedIn.COLLECTIVE
    line = linecache.getline(stack[0].file, stack[0].line).split()
    return RaisedIn.OWN_CODE if line[:1] == ["raise"] else RaisedIn.UNKNOWN


def has_timed_out(rank_exit: RankExit) -> bool:
    return has_lost_peer(rank_exit) and bool(TIMEOUT_TEXT.search((rank_exit.failure or {}).get("message", "")))
