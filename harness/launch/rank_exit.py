"""How one rank of a job ended, and where it was: plain data, and what its stack says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.launch.inflight import Issued


@dataclass(frozen=True)
class Fate:
    """How one rank ended. status: exit code, minus the signal, or None if nothing was heard. killed: why we killed it.

    failure: failures/rank_NN.json. stack: stacks/rank_NN.txt. stopped: by SIGSTOP or the like when it was killed.
    left: the processes that outlived it. trouble: what happened to the launcher, if something did. host: its name, where
    there may be several.
    """

    rank: int
    status: int | None
    ended: float = 0.0
    killed: str = ""
    failure: dict[str, Any] | None = None
    issued: tuple[Issued, ...] = ()
    stack: str = ""
    log: str = ""
    log_tail: str = ""
    trouble: str = ""
    stopped: bool = False
    left: tuple[str, ...] = ()
    host: str = ""


class Frame(NamedTuple):
    file: str
    line: int
    function: str


def failed(fate: Fate) -> bool:
    return bool(fate.status) and not fate.killed


def winding_up(fate: Fate) -> bool:
    """Its work was done: threads that it waited for, or what was to be called at its exit, kept it."""
    return any(frame.function == "wind_up" and LAUNCH.search(frame.file) for frame in frames(fate))


def moment(fate: Fate) -> float:
    return fate.failure["time"] if fate.failure else fate.ended


LIBRARY = re.compile(
    r"/(site|dist)-packages/(torch|numpy|torchao)/|/lib/python3\.\d+/(?!(site|dist)-packages/)|^<|/harness/probe/"
)
LAUNCH = re.compile(r"/harness/launch/|<frozen|/runpy\.py$")
MAY_WAIT = re.compile(r"/torch/distributed/|/torch/autograd/graph\.py$|/torch/nn/parallel/|/torch/cuda/")
SHOWN = 8


def frames(fate: Fate) -> list[Frame]:
    """Innermost first: of the exception, or of the main thread when its stack was dumped."""
    if fate.failure:
        return [Frame(*frame) for frame in fate.failure["inside"]]
    return parse_stack(fate.stack)


def parse_stack(text: str) -> list[Frame]:
    """The main thread's frames in the last dump of a stacks file, whose first line names that thread."""
    main = re.match(r"main thread (0x[0-9a-f]+)", text)
    parts = re.split(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*$", text, flags=re.MULTILINE)
    threads = dict(zip(parts[1::2], parts[2::2], strict=True))
    body = threads.get(main.group(1), "") if main else ""
    return [Frame(file, int(line), name) for file, line, name in re.findall(r'File "(.+)", line (\d+) in (.+)', body)]


def useful(stack: Sequence[Frame]) -> list[Frame]:
    """Up to eight frames of the trainer, under the library call it is in; the library's alone without a trainer."""
    stack = [frame for frame in stack if not LAUNCH.search(frame.file)]
    own = [frame for frame in stack if not LIBRARY.search(frame.file)]
    if not own:
        return list(stack[:SHOWN])
    return [*stack[: stack.index(own[0])][:1], *own[:SHOWN]]


def render(stack: Iterable[Frame]) -> str:
    """`file:line in function`, innermost first; library paths from the package on."""
    return "\n".join(f"{re.sub('.*/(site|dist)-packages/', '', f.file)}:{f.line} in {f.function}" for f in stack)


def busy(fate: Fate) -> bool:
    """Its stack says that it computes or sleeps in its own code, so it waits for no rank. False without a stack."""
    calls = called(fate)
    return bool(calls) and not any(MAY_WAIT.search(e.file) or e.function in ("wait", "synchronize") for e in calls)


def in_collective(fate: Fate) -> bool:
    """Its stack says that it is in torch.distributed, so it waits for others. False without a stack."""
    return not winding_up(fate) and any("/torch/distributed/" in frame.file for frame in called(fate))


def called(fate: Fate) -> list[Frame]:
    """The calls that it is in, innermost first, up to the first one in code of its own."""
    stack = frames(fate)
    own = (number for number, frame in enumerate(stack) if not LIBRARY.search(frame.file))
    return stack[: next(own, len(stack)) + 1]
