"""Which rank caused the failure, and which only waited for it. Pure functions of plain data; the rules, first match:

failed_alone   it died by a signal that was not ours, or raised something else than "my peer is gone"
disagreeing    at one place of a group's sequence it issued another collective than the others
aborted        it died by SIGABRT, which is gloo's way of finding out about the above
waited_for     others are ahead of it in a group's sequence, while it waits for nobody; in a cycle, all of it
left_early     it exited 0 before the others lost their connection
stuck          it was killed while computing, the others while waiting; if no stack tells, all that were killed
first_failed   it raised first
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.evidence import AT_WORK, Exit
from harness.launch.inflight import Issued

Place = tuple[str, tuple[int, ...]]  # a group, by name and members: two groups of one split can share a name


@dataclass(frozen=True)
class Fate:
    """How one rank ended. status: exit code, minus the signal, or None if nothing was heard. killed: why we killed it.

    failure: failures/rank_NN.json. stack: stacks/rank_NN.txt. trouble: what happened to the launcher, if something did.
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


class Frame(NamedTuple):
    file: str
    line: int
    function: str


def judge(fates: Sequence[Fate]) -> list[Exit]:
    """One Exit per rank, the culprits blamed and told why."""
    blamed = culprits(fates)
    return [exit_of(fate, blamed.get(fate.rank)) for fate in fates]


def exit_of(fate: Fate, why: str | None) -> Exit:
    """`why`: None for a rank that is not to blame, "" for one whose own error says it all."""
    how = how_it_ended(fate)
    return Exit(
        rank=fate.rank,
        how=how,
        code=fate.status if fate.status is not None and fate.status >= 0 else None,
        signal=signal_name(fate.status) if how in ("signal", "killed") else None,
        error="; ".join(filter(None, [what_happened(fate), why])),
        stack="" if how == "ok" else render(useful(frames(fate))),
        last_collective=describe(fate.issued[-1]) if fate.issued else "",
        blamed=why is not None,
        log=fate.log,
    )


def how_it_ended(fate: Fate) -> str:
    if fate.killed:
        return "killed"
    if fate.status is None:
        return "lost"
    return "ok" if fate.status == 0 else "raised" if fate.status > 0 else "signal"


def signal_name(status: int | None) -> str | None:
    return signal.Signals(-status).name if status in {-number for number in signal.Signals} else f"signal {status}"


def what_happened(fate: Fate) -> str:
    """One line."""
    how = how_it_ended(fate)
    if how == "raised" and fate.failure:
        return one_line(f"{fate.failure['type']}: {fate.failure['message']}")
    if how == "raised":
        return f"exited with code {fate.status} without an exception"
    if how == "signal":
        return one_line(f"died by {signal_name(fate.status)}, not sent by the harness. {last_words(fate)}")
    return {"ok": "", "killed": fate.killed, "lost": f"nothing was heard of its end. {fate.trouble}".strip()}[how]


GLOO_PADDING = re.compile(r"\[(enforce fail at )?\S+/(gloo/\S+?:\d+)\]|This is typically caused.*|GLHF.*")


def one_line(text: str) -> str:
    """At most 300 characters, without the builder's paths and the good wishes of gloo."""
    line = " ".join(GLOO_PADDING.sub(r"\2", " ".join(text.split())).split())
    return line if len(line) <= 300 else f"{line[:297]}..."


def last_words(fate: Fate) -> str:
    """What C++ says when it terminates, or the last line of the log."""
    lines = [line.strip() for line in fate.log_tail.splitlines() if line.strip()]
    thrown = [line for line in lines if line.startswith("what():")]
    return (thrown or lines or [""])[-1]


# --- the rules -------------------------------------------------------------------------------------------------------


def culprits(fates: Sequence[Fate]) -> dict[int, str]:
    """Ranks to blame and why. {} when all is well, or nothing is known, or they only were slow."""
    if all(fate.status == 0 for fate in fates) or any(AT_WORK in fate.killed for fate in fates):
        return {}
    return (
        failed_alone(fates)
        or disagreeing(fates)
        or aborted(fates)
        or waited_for(fates)
        or left_early(fates)
        or stuck(fates)
        or first_failed(fates)
    )


def failed_alone(fates: Sequence[Fate]) -> dict[int, str]:
    return {fate.rank: "" for fate in fates if failed(fate) and not lost_peer(fate) and fate.status != -signal.SIGABRT}


def aborted(fates: Sequence[Fate]) -> dict[int, str]:
    return {fate.rank: "" for fate in fates if fate.status == -signal.SIGABRT and not lost_peer(fate)}


def first_failed(fates: Sequence[Fate]) -> dict[int, str]:
    first = min(filter(failed, fates), key=moment, default=None)
    return {first.rank: "the first to fail"} if first else {}


def left_early(fates: Sequence[Fate]) -> dict[int, str]:
    """A rank that exits closes its connections; those that still wanted something of it fail."""
    first = min(map(moment, filter(lost_peer, fates)), default=0.0)
    gone = [fate for fate in fates if fate.status == 0 and fate.ended < first]
    return {fate.rank: "exited while others still waited for a collective" for fate in gone}


def stuck(fates: Sequence[Fate]) -> dict[int, str]:
    killed = [fate for fate in fates if fate.killed]
    guilty = [fate for fate in killed if busy(fate)] or ([] if any(map(failed, fates)) else killed)
    return {fate.rank: "still running, and no other rank is known to be the cause" for fate in guilty}


def failed(fate: Fate) -> bool:
    return bool(fate.status) and not fate.killed


def moment(fate: Fate) -> float:
    return fate.failure["time"] if fate.failure else fate.ended


PEER_GONE = re.compile(
    r"Connection (reset|closed|refused)|Broken pipe|[Tt]imed ?out|[Tt]imeout|Socket closed|recvValue failed"
    r"|remote process exited|unhandled system error|NCCL communicator was aborted|failed to connect"
)
NETWORK_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError"}
NETWORK_WORDS = re.compile(
    r"gloo|nccl|store|keys:", re.IGNORECASE
)  # a plain RuntimeError is one of gloo's if it says so


def lost_peer(fate: Fate) -> bool:
    """It failed because another rank did not answer. NCCL's watchdog says so by SIGABRT."""
    if fate.failure:
        message = fate.failure["message"]
        network = fate.failure["type"] in NETWORK_ERRORS or bool(NETWORK_WORDS.search(message))
        return network and bool(PEER_GONE.search(message))
    return fate.status == -signal.SIGABRT and "Watchdog caught collective operation timeout" in fate.log_tail


# --- sequences per group ---------------------------------------------------------------------------------------------

EQUAL_BYTES = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}  # every member passes as many
POINT_TO_POINT = {"send", "recv"}


def place(issued: Issued) -> Place:
    return issued.group, issued.ranks


def sequenced(fates: Iterable[Fate]) -> list[Place]:
    """Groups whose members must issue the same sequence: those over which nothing was sent from one to one."""
    issued = [each for fate in fates for each in fate.issued]
    point_to_point = {place(each) for each in issued if each.op in POINT_TO_POINT}
    return [each for each in dict.fromkeys(map(place, issued)) if each not in point_to_point]


def disagreeing(fates: Sequence[Fate]) -> dict[int, str]:
    """At the first place where members issued different collectives: the minority, or all if there is none."""
    for group in sequenced(fates):
        for seq in sorted({each.seq for fate in fates for each in fate.issued if place(each) == group}):
            issued = {f.rank: each for f in fates for each in f.issued if place(each) == group and each.seq == seq}
            if odd := minority({rank: signature(each) for rank, each in issued.items()}):
                return {rank: against(rank, issued) for rank in odd}
    return {}


def signature(issued: Issued) -> tuple[str, int]:
    return issued.op, issued.bytes if issued.op in EQUAL_BYTES else 0


def minority(signatures: dict[int, tuple[str, int]]) -> list[int]:
    counts = Counter(signatures.values()).most_common()
    if len(counts) < 2:
        return []
    usual = counts[0][0] if counts[0][1] > counts[1][1] else None
    return [rank for rank, each in signatures.items() if each != usual]


def against(rank: int, issued: dict[int, Issued]) -> str:
    other = next(each for each in issued if signature(issued[each]) != signature(issued[rank]))
    return f"issued {describe(issued[rank])} where rank {other} issued {describe(issued[other])}"


def waited_for(fates: Sequence[Fate]) -> dict[int, str]:
    """Follow who waits for whom to those that wait for nobody."""
    waits = {fate.rank: waiting(fate, fates) for fate in fates}
    ends = {peer for peers in waits.values() for peer in peers if not waits[peer]}
    if ends:
        return {peer: why_waited_for(peer, fates, waits) for peer in sorted(ends)}
    ring = cycle(waits)
    computing = [fate.rank for fate in fates if fate.rank in ring and busy(fate)]
    stuck_in = {rank: next(each for peer, each in waits[rank].items() if peer in ring) for rank in ring}
    told = "; ".join(f"rank {rank} in {describe(each)} named {each.group!r}" for rank, each in stuck_in.items())
    return {rank: f"each waits for the other: {told}" for rank in computing or ring}


def why_waited_for(peer: int, fates: Sequence[Fate], waits: dict[int, dict[int, Issued]]) -> str:
    waiters = [rank for rank, peers in waits.items() if peer in peers]
    left = any(fate.rank == peer and fate.status == 0 for fate in fates)
    who = f"rank{'s' * (len(waiters) > 1)} {', '.join(map(str, waiters))} waited for it"
    return f"{'exited while ' * left}{who} in {describe(waits[waiters[0]][peer])}"


def waiting(fate: Fate, fates: Sequence[Fate]) -> dict[int, Issued]:
    """The ranks this one waits for, and in what. One that exited 0 waits for nobody."""
    if fate.status == 0:
        return {}
    ahead = {peer.rank: each for group in sequenced(fates) for peer, each in behind(fate, group, fates)}
    latest = fate.issued[-1] if fate.issued else None
    if latest and latest.peer is not None and latest.op in POINT_TO_POINT and not busy(fate):
        ahead.setdefault(latest.peer, latest)
    return {rank: each for rank, each in ahead.items() if rank in {fate.rank for fate in fates}}


def behind(fate: Fate, group: Place, fates: Sequence[Fate]) -> list[tuple[Fate, Issued]]:
    """Members of `group` that have yet to issue what this rank issued last in it."""
    mine = last(fate, group)
    members = [peer for peer in fates if peer.rank in group[1] and mine]
    return [(peer, mine) for peer in members if mine and position(peer, group) < mine.seq]


def last(fate: Fate, group: Place) -> Issued | None:
    return max((each for each in fate.issued if place(each) == group), key=lambda each: each.seq, default=None)


def position(fate: Fate, group: Place) -> int:
    found = last(fate, group)
    return found.seq if found else -1


def cycle(waits: dict[int, dict[int, Issued]]) -> list[int]:
    """The ranks that wait for each other: drop, until none is left, whoever nobody remaining waits for."""
    ring = {rank for rank, peers in waits.items() if peers}
    while idle := {rank for rank in ring if not any(rank in waits[other] for other in ring)}:
        ring -= idle
    return sorted(ring)


# --- stacks ----------------------------------------------------------------------------------------------------------

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
    stack = frames(fate)
    for frame in stack:
        if MAY_WAIT.search(frame.file) or frame.function in ("wait", "synchronize"):
            return False
        if not LIBRARY.search(frame.file):
            break
    return bool(stack)


# --- words -----------------------------------------------------------------------------------------------------------


def describe(issued: Issued) -> str:
    """`all_reduce #12 of group [0,1,2,3] (step 2, backward, 16.4 KB)`"""
    peer = "" if issued.peer is None else f" {'to' if issued.op == 'send' else 'from'} rank {issued.peer}"
    about = ", ".join(filter(None, [f"step {issued.step}", issued.phase, size(issued.bytes)]))
    return f"{issued.op} #{issued.seq}{peer} of group {ranks_text(issued.ranks)} ({about})"


def size(count: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def ranks_text(ranks: Sequence[int]) -> str:
    """All of a small group, the ends of a long run: [0,1,2,3], [0-15]; otherwise the first and how many."""
    if len(ranks) <= 8:
        return f"[{','.join(map(str, ranks))}]"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"[{ranks[0]}-{ranks[-1]}]"
    return f"[{','.join(map(str, ranks[:4]))},.. {len(ranks)} ranks]"
