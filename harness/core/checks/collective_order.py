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
UNEVEN_OPERATORS = ("all_to_all", "scatter", "gather")  # ranks may rightly pass different numbers of bytes


def check(trial: Trial) -> Result:
    """Compare what the members of each group issued, and what pairs of ranks sent and received.

    NOT APPLICABLE for one rank, or if only some ranks ran and no group is wholly among them. Sends and receives are not
    compared if a rank did not end well. Examined are the calls of groups that left evidence as a whole.
    """
    if trial.plan.dims.world_size == 1:
        return not_applicable("collective_order", "one rank has no peers")
    sequences: dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]] = defaultdict(dict)
    calls_of_whole_groups = {rank: _calls_of_whole_groups(trial, rank) for rank in sorted(trial.ranks)}
    for rank, evidence in sorted(trial.ranks.items()):
        for collective in evidence.collectives:
            if collective.op not in POINT_TO_POINT:
                sequences[collective.group, collective.ranks].setdefault(rank, []).append(collective)
    findings: list[Finding] = []
    for (_, ranks), by_rank in sequences.items():
        compared = _truncate_at_join(trial, _truncate_at_failure(trial, ranks, by_rank))
        findings += _first_difference_findings(trial, ranks, compared)
    if not _failed_ranks(trial):
        findings += _unmatched_findings(
            {rank: _without_unseen_peers(trial, calls) for rank, calls in calls_of_whole_groups.items()}
        )
    examined = sum(map(len, calls_of_whole_groups.values()))
    if len(trial.run.started_ranks) < trial.run.world_size and not examined and not findings:
        return not_applicable("collective_order", "no group is wholly among the ranks that ran")
    return verdict_of("collective_order", findings, examined)


def _failed_ranks(trial: Trial) -> set[int]:
    """Return the ranks whose exit record is not "ok"."""
    return {exit.rank for exit in trial.run.exits if exit.how != "ok"}


def _truncate_at_failure(
    trial: Trial, ranks: tuple[int, ...], by_rank: dict[int, list[Collective]]
) -> dict[int, list[Collective]]:
    """Return, by rank, the first collectives of one group: as many as the failed rank that issued fewest.

    All if none failed. The check `completed` reports that such ranks issued fewer. ranks: members of the group.
    """
    lengths = [len(by_rank.get(rank, ())) for rank in ranks if rank in trial.ranks and rank in _failed_ranks(trial)]
    least = min(lengths, default=None)
    return {rank: calls[:least] for rank, calls in by_rank.items()}


def _truncate_at_join(trial: Trial, by_rank: dict[int, list[Collective]]) -> dict[int, list[Collective]]:
    """Return, by rank, the collectives of the steps in which all of these ranks had inputs.

    All if none ran out of them.
    """
    joined_steps = [trial.ranks[rank].joined for rank in by_rank]
    last = min((step for step in joined_steps if step is not None), default=None)
    if last is None:
        return by_rank
    until_joined: dict[int, list[Collective]] = {}
    for rank, calls in by_rank.items():
        until_joined[rank] = [call for call in calls if call.step <= last]
    return until_joined


def _calls_of_whole_groups(trial: Trial, rank: int) -> list[Collective]:
    """Return a rank's collectives whose whole group left evidence, and its sends and receives whose other side did."""
    calls = trial.ranks[rank].collectives
    ranks_with_evidence = trial.run.recorded_ranks
    is_whole: dict[tuple[int, ...], bool] = {}
    for ranks in {call.ranks for call in calls}:
        is_whole[ranks] = all(member in ranks_with_evidence for member in ranks)
    return [call for call in calls if (is_whole[call.ranks] if call.peer is None else call.peer in ranks_with_evidence)]


def _without_unseen_peers(trial: Trial, calls: list[Collective]) -> list[Collective]:
    """Return the calls but for sends and receives whose peer left no evidence of its own."""
    return [call for call in calls if call.peer is None or call.peer in trial.ranks]


def _first_difference_findings(
    trial: Trial, ranks: tuple[int, ...], by_rank: dict[int, list[Collective]]
) -> list[Finding]:
    """Return a finding of the first collective at which members of one group disagree. Empty if they agree in all.

    The call of most members is expected, of a tie that of the lowest rank. Members without evidence are not compared.
    """
    present = [rank for rank in ranks if rank in trial.ranks]
    longest = max(len(sequence) for sequence in by_rank.values())
    for index in range(longest):
        calls = {rank: call_text(by_rank.get(rank, []), index, phases=trial.has_claims_or_contents) for rank in present}
        if len(set(calls.values())) > 1:
            majority = max(calls.values(), key=list(calls.values()).count)  # of a tie, the lowest rank's
            differing = {rank: call for rank, call in calls.items() if call != majority}
            return [
                Finding(
                    kind="group",
                    group=ranks,
                    ranks=ranks,
                    quantity=f"collective {index}",
                    expected=f"{majority} on every rank",
                    observed="; ".join(f"{call} on rank {rank}" for rank, call in differing.items()),
                )
            ]
    return []


def call_text(sequence: list[Collective], index: int, *, phases: bool = True) -> str:
    """Return what members of a group must have in common in the call at an index: operator, bytes, dtype, time, root.

    "nothing" if the sequence is shorter. Bytes are left out where ranks may pass different numbers; step and phase are
    for a broadcast. phases: whether to include the phase; it is left out where phases follow from times alone.
    """
    if index >= len(sequence):
        return "nothing"
    call = sequence[index]
    size = "" if call.op in UNEVEN_OPERATORS else f"{bytes_text(call.bytes)} "
    time = ""
    if call.op != WITHOUT_PLACE:
        time = f"step {call.step}"
        if phases:
            time += f", {call.phase}"
    root = "" if call.root is None else f"root {call.root_place} of the group"
    return f"{call.op} of {size}{call.dtype} ({', '.join(filter(None, (time, root)))})"


def _unmatched_findings(calls_by_rank: Mapping[int, list[Collective]]) -> list[Finding]:
    """Return findings of pairs of ranks where the one sent another number of bytes than the other received.

    Pairs whose target received from any source over that group are left out: from whom is not on record.
    """
    balance: dict[tuple[int, int, str], list[int]] = defaultdict(lambda: [0, 0])
    from_any: set[tuple[int, str]] = set()
    for rank, calls in calls_by_rank.items():
        for call in calls:
            if call.op == "recv" and call.peer is None:
                from_any.add((rank, call.group))
            elif call.op in POINT_TO_POINT and call.peer is not None:
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
        for (source, target, group), (sent, received) in sorted(balance.items())
        if sent != received and (target, group) not in from_any
    ]
