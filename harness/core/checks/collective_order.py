"""The members of a group issue the same collectives in the same order, and every send has its receive.

gloo pairs a skipped collective with the next one of equal size without any error, so only comparing sequences shows it.
Where only some ranks ran, two members of a group that disagree fail the check, whoever is missing. Their agreement proves
nothing about a group that is not complete. A rank that did not end well is compared as far as it came. A rank that has no
more inputs, where others have some, shadows what they issue (torch's Join): its groups are compared until then. A broadcast
may be issued in another step or pass on each rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from harness.core.evidence.records import Collective
from harness.core.evidence.summary import WITHOUT_PLACE
from harness.core.evidence.text import bytes_text
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, not_applicable, verdict_of
from harness.core.judge.trial import Trial

STAGE = "structure"
NEEDS = frozenset({"structure", "members"})

POINT_TO_POINT = ("send", "recv")
UNEVEN = ("all_to_all", "scatter", "gather")  # ranks may rightly pass different numbers of bytes


def check(trial: Trial) -> Result:
    if trial.plan.dims.world_size == 1:
        return not_applicable("collective_order", "one rank has no peers")
    sequences: dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]] = defaultdict(dict)
    whole = {rank: _of_whole_groups(trial, rank) for rank in sorted(trial.ranks)}
    for rank, evidence in sorted(trial.ranks.items()):
        for collective in evidence.collectives:
            if collective.op not in POINT_TO_POINT:
                sequences[collective.group, collective.ranks].setdefault(rank, []).append(collective)
    compared = ((ranks, _as_far_as_all(trial, ranks, by_rank)) for (_, ranks), by_rank in sequences.items())
    compared = ((ranks, _until_joined(trial, by_rank)) for ranks, by_rank in compared)
    findings = [found for ranks, by_rank in compared for found in _first_difference(trial, ranks, by_rank)]
    findings += (
        [] if _unwell(trial) else _unmatched({rank: _between_read(trial, calls) for rank, calls in whole.items()})
    )
    examined = sum(map(len, whole.values()))
    if len(trial.run.started) < trial.run.world_size and not examined and not findings:
        return not_applicable("collective_order", "no group is wholly among the ranks that ran")
    return verdict_of("collective_order", findings, examined)


def _unwell(trial: Trial) -> set[int]:
    return {exit.rank for exit in trial.run.exits if exit.how != "ok"}


def _as_far_as_all(
    trial: Trial, ranks: tuple[int, ...], by_rank: dict[int, list[Collective]]
) -> dict[int, list[Collective]]:
    """Who did not end well issued fewer, which the check `completed` says."""
    ended = (len(by_rank.get(rank, ())) for rank in ranks if rank in trial.ranks and rank in _unwell(trial))
    least = min(ended, default=None)
    return {rank: calls[:least] for rank, calls in by_rank.items()}


def _until_joined(trial: Trial, by_rank: dict[int, list[Collective]]) -> dict[int, list[Collective]]:
    """Return what was issued while all of these ranks had inputs."""
    last = min((step for rank in by_rank if (step := trial.ranks[rank].joined) is not None), default=None)
    if last is None:
        return by_rank
    return {rank: [call for call in calls if call.step <= last] for rank, calls in by_rank.items()}


def _of_whole_groups(trial: Trial, rank: int) -> list[Collective]:
    """Return the collectives whose whole group left evidence, and sends and receives whose other side did."""
    calls, there = trial.ranks[rank].collectives, trial.run.seen
    whole = {ranks: all(member in there for member in ranks) for ranks in {call.ranks for call in calls}}
    return [call for call in calls if (whole[call.ranks] if call.peer is None else call.peer in there)]


def _between_read(trial: Trial, calls: list[Collective]) -> list[Collective]:
    return [call for call in calls if call.peer is None or call.peer in trial.ranks]


def _first_difference(trial: Trial, ranks: tuple[int, ...], by_rank: dict[int, list[Collective]]) -> list[Finding]:
    """The first place at which members of one group disagree, and what each of them did there."""
    present = [rank for rank in ranks if rank in trial.ranks]
    longest = max(len(sequence) for sequence in by_rank.values())
    for index in range(longest):
        calls = {rank: call_text(by_rank.get(rank, []), index, phases=trial.holds_told) for rank in present}
        if len(set(calls.values())) > 1:
            majority = max(calls.values(), key=list(calls.values()).count)  # of a tie, the lowest rank's
            odd = {rank: call for rank, call in calls.items() if call != majority}
            return [
                Finding(
                    kind="group",
                    group=ranks,
                    ranks=ranks,
                    quantity=f"collective {index}",
                    expected=f"{majority} on every rank",
                    observed="; ".join(f"{call} on rank {rank}" for rank, call in odd.items()),
                )
            ]
    return []


def call_text(sequence: list[Collective], index: int, *, phases: bool = True) -> str:
    """What members of a group must have in common. phases: unless they follow from times alone."""
    if index >= len(sequence):
        return "nothing"
    call = sequence[index]
    many = "" if call.op in UNEVEN else f"{bytes_text(call.bytes)} "
    place = "" if call.op == WITHOUT_PLACE else f"step {call.step}" + f", {call.phase}" * phases
    root = "" if call.root is None else f"root {call.root_place} of the group"
    return f"{call.op} of {many}{call.dtype} ({', '.join(filter(None, (place, root)))})"


def _unmatched(whole: Mapping[int, list[Collective]]) -> list[Finding]:
    balance: dict[tuple[int, int, str], list[int]] = defaultdict(lambda: [0, 0])
    for rank, calls in whole.items():
        for call in calls:
            if call.op in POINT_TO_POINT and call.peer is not None:
                pair = (rank, call.peer) if call.op == "send" else (call.peer, rank)
                balance[(*pair, call.group)][POINT_TO_POINT.index(call.op)] += call.bytes
    return [
        Finding(
            kind="group",
            ranks=(source, target),
            quantity=f"sent by rank {source}, received by rank {target}",
            expected=sent,
            observed=received,
            unit="bytes",
        )
        for (source, target, _), (sent, received) in sorted(balance.items())
        if sent != received
    ]
