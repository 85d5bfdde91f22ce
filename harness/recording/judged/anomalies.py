"""What is anomalous in a recording, whatever was requested, and what checks say of it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from harness.core.evidence.keys import ranks_key, steps_text
from harness.core.evidence.lost_peer import lost_a_peer
from harness.core.evidence.recording import Beside, Last
from harness.core.evidence.summary import Summary
from harness.core.evidence.text import names_text, ranks_text, some_ranks
from harness.core.judge.finding import Finding
from harness.core.judge.local_training import averaged, local_by, not_averaged, partly_equal
from harness.core.judge.observed import copied, differing, odd_ranks, out_of_order, replicas, together
from harness.core.judge.result import Result, Verdict, verdict_of
from harness.core.judge.separate_models import separate_models
from harness.recording.judged.recorded_waits import alike, different_calls, issued_otherwise, waits
from harness.recording.judged.stored_recording import Recording, exit_text, only_waited

GLOO = re.compile(r"\[/\S+\] |\. This is typically caused.*")


class Kind(StrEnum):
    """Kinds of anomalies, as the page calls them."""

    NO_EVIDENCE = "NO EVIDENCE"
    UNREADABLE = "UNREADABLE"
    NOT_RECORDED = "NOT RECORDED"
    RAISED = "RAISED"
    INTERRUPTED = "INTERRUPTED"
    ENDED = "ENDED"
    ENDED_UNHEARD = "ENDED UNHEARD"
    REACHED = "REACHED"
    WAITED_FOR = "WAITED FOR"
    CALLS_DIFFER = "CALLS DIFFER"
    ORDER = "ORDER"
    TWO_THREADS = "TWO THREADS"
    SEPARATE_MODELS = "SEPARATE MODELS"
    REPLICAS_DIFFER = "REPLICAS DIFFER"
    NOT_AVERAGED = "NOT AVERAGED"
    PARTLY_EQUAL = "PARTLY EQUAL"
    NOT_KEPT_EQUAL = "NOT KEPT EQUAL"
    NOT_TRAINED = "NOT TRAINED"
    NOT_FINITE = "NOT FINITE"
    UNLIKE_OTHERS = "UNLIKE OTHERS"


CHECK_AND_VERDICT: dict[Kind, tuple[str, Verdict]] = {
    Kind.NO_EVIDENCE: ("completed", Verdict.FAIL),
    Kind.UNREADABLE: ("completed", Verdict.UNKNOWN),
    Kind.NOT_RECORDED: ("completed", Verdict.UNKNOWN),
    Kind.RAISED: ("completed", Verdict.FAIL),
    Kind.INTERRUPTED: ("completed", Verdict.FAIL),
    Kind.ENDED: ("completed", Verdict.FAIL),
    Kind.ENDED_UNHEARD: ("completed", Verdict.FAIL),
    Kind.REACHED: ("completed", Verdict.FAIL),
    Kind.WAITED_FOR: ("completed", Verdict.FAIL),
    Kind.CALLS_DIFFER: ("collective_order", Verdict.FAIL),
    Kind.ORDER: ("collective_order", Verdict.FAIL),
    Kind.TWO_THREADS: ("collective_order", Verdict.FAIL),
    Kind.SEPARATE_MODELS: ("replica_agreement", Verdict.FAIL),
    Kind.REPLICAS_DIFFER: ("replica_agreement", Verdict.FAIL),
    Kind.NOT_AVERAGED: ("replica_agreement", Verdict.UNKNOWN),
    Kind.PARTLY_EQUAL: ("replica_agreement", Verdict.UNKNOWN),
    Kind.NOT_KEPT_EQUAL: ("replica_agreement", Verdict.UNKNOWN),
    Kind.NOT_TRAINED: ("update", Verdict.FAIL),
    Kind.NOT_FINITE: ("finite", Verdict.FAIL),
    Kind.UNLIKE_OTHERS: ("settings", Verdict.FAIL),
}
"""Kind of anomaly -> the check that it is of, and its verdict. UNKNOWN is what is wrong with the recording, or may be meant."""
NO_CHECK_OF_A_LAYOUT = frozenset(
    {Kind.SEPARATE_MODELS, Kind.NOT_TRAINED, Kind.TWO_THREADS, Kind.CALLS_DIFFER, Kind.WAITED_FOR}
)
"""What no check of a layout says, and others follow from."""


@dataclass(frozen=True)
class Anomaly:
    """One anomaly."""

    label: Kind
    """Its kind, as the page has it."""
    text: str
    """What is so, in words."""
    ranks: tuple[int, ...] = ()
    """Global ranks, ascending; empty where it is of no rank."""
    step: int | None = None
    """The training step, 0 before the first; None where it is of no step."""

    @classmethod
    def of_ranks(cls, label: Kind, ranks: Iterable[int], text: str, step: int | None = None) -> Anomaly:
        """Return one of these ranks."""
        return cls(label, text, tuple(sorted(set(ranks))), step)

    @property
    def check(self) -> str:
        """The check that it is of."""
        return CHECK_AND_VERDICT[self.label][0]

    @property
    def verdict(self) -> Verdict:
        """FAIL; UNKNOWN of what is wrong with the recording, or may be meant."""
        return CHECK_AND_VERDICT[self.label][1]


def results_of_anomalies(recording: Recording) -> list[Result]:
    """Return what checks say of a recorded job, whatever was requested: `completed`, and those that have an anomaly."""
    if not recording.summaries:
        return [Result("completed", Verdict.UNKNOWN, note=recording.nothing)]
    by_check: dict[str, list[Anomaly]] = {"completed": []}
    for anomaly in anomalies(recording):
        by_check.setdefault(anomaly.check, []).append(anomaly)
    return [_result(check, of_check, len(recording.summaries)) for check, of_check in by_check.items()]


def _result(check: str, found: Sequence[Anomaly], examined: int) -> Result:
    """Return what a check says that has these anomalies: FAIL if one of them fails it. examined: how many ranks."""
    failing = [anomaly for anomaly in found if anomaly.verdict is Verdict.FAIL]
    if found and not failing:
        return Result(check, Verdict.UNKNOWN, examined, note=found[0].text)
    findings = [
        Finding(ranks=anomaly.ranks, step=anomaly.step, quantity=anomaly.label.lower(), note=anomaly.text)
        for anomaly in failing
    ]
    return verdict_of(check, findings, examined)


def anomalies(recording: Recording) -> list[Anomaly]:
    """Return all anomalies, the worst first. Further jobs come after the first one; their ranks without evidence are left out,
    for a process may be a rank again without others."""
    jobs = enumerate(recording.others, start=2)
    others = [
        replace(one, text=f"in job {number}: {one.text}")
        for number, job in jobs
        for one in _of_job(job)
        if one.label != Kind.NO_EVIDENCE
    ]
    return [*_of_job(recording), *others]


def _of_job(recording: Recording) -> list[Anomaly]:
    summaries = [one for _, one in sorted(recording.summaries.items())]
    shared = _by_two_threads(summaries)
    waiting = all(one.progress.ended != "raised" for one in summaries)  # of two threads each may wait for ever
    return [
        *_no_evidence(recording),
        *_not_recorded(summaries),
        *(shared if waiting else []),
        *_ended(recording),
        *_order(summaries),
        *([] if waiting else shared),
        *_separate(summaries),
        *_untrained(summaries),
        *_replicas(summaries),
        *_partly(summaries),
        *_not_finite(summaries),
        *[
            Anomaly.of_ranks(
                Kind.UNLIKE_OTHERS,
                one.ranks,
                f"{one.what} on {some_ranks(one.ranks)}: {one.theirs}; on most: {one.most}",
            )
            for one in odd_ranks(summaries)[:4]
            if one.what != "steps" or (recording.code or 0) >= 0  # a signal meets each rank in another step
        ],
    ]


def _no_evidence(recording: Recording) -> list[Anomaly]:
    rows = [Anomaly(Kind.NO_EVIDENCE, recording.nothing)] if recording.nothing else []
    missing = sorted(set(range(recording.world)) - set(recording.summaries) - set(recording.unreadable))
    if missing and recording.summaries:
        text = f"from {some_ranks(missing)}: they ended before their first forward pass, or train nothing"
        rows.append(Anomaly.of_ranks(Kind.NO_EVIDENCE, missing, text))
    return rows + [Anomaly(Kind.UNREADABLE, text, (rank,)) for rank, text in list(recording.unreadable.items())[:2]]


def _not_recorded(summaries: Sequence[Summary]) -> list[Anomaly]:
    """A mistake of the recorder's: what it saw before is no longer all."""
    failed = together(summaries, lambda one: next(iter(one.recorder.failed), None))
    return [
        Anomaly.of_ranks(Kind.NOT_RECORDED, ranks, f"on {some_ranks(ranks)}: {text}")
        for text, ranks in list(failed.items())[:1]
    ]


def _by_two_threads(summaries: Sequence[Summary]) -> list[Anomaly]:
    """Return each group over which several threads issue collectives at one time."""
    found: dict[str, list[tuple[int, Beside]]] = defaultdict(list)
    for one in summaries:
        for beside in one.groups.beside:
            found[ranks_key(beside.ranks)].append((one.rank, beside))
    return [
        Anomaly.of_ranks(Kind.TWO_THREADS, (rank for rank, _ in uses), _calls_of_threads(uses[0][1]))
        for uses in found.values()
    ]


def _calls_of_threads(one: Beside) -> str:
    threads = ", ".join(one.threads[:2]) + ", .." * (len(one.threads) > 2)
    return (
        f"thread {threads} issues {', '.join(one.ops)} over {ranks_text(one.ranks)} while the thread that trains is at work,"
        f" and that one issues {', '.join(one.trains)} over the same group ({one.group}): nothing fixes their order"
    )


def _ended(recording: Recording) -> list[Anomaly]:
    """Ranks that raised, with their errors; ranks that died or exited; ranks that were killed, and in which collective. What
    follows from another rank's exit comes last."""
    raised = together(
        recording.summaries.values(), lambda one: one.progress.error if one.progress.ended == "raised" else None
    )
    causes = sorted(raised.items(), key=lambda item: lost_a_peer(item[0]))[:3]
    stopped = [rank for error, ranks in raised.items() if _by_hand(error) for rank in ranks]
    own = [_raised(error, ranks) for error, ranks in causes if not lost_a_peer(error) and not _by_hand(error)]
    own += _interrupted(recording, stopped)
    peers = [rank for rank, one in recording.summaries.items() if one.progress.ended != "raised"]
    ended = all(recording.summaries[rank].progress.ended == "ok" or only_waited(recording, rank) for rank in peers)
    left = raised and all(map(lost_a_peer, raised)) and ended  # by peers that went on, or by each other
    own += _waits(recording) if stopped or left or (recording.code or 0) < 0 else []
    lost = [_raised(error, ranks) for error, ranks in causes if lost_a_peer(error)]
    quiet = [rank for rank, one in recording.summaries.items() if one.progress.ended != "raised"]
    told = {rank: f"{how}; {_last(recording, rank)}" for rank in quiet if (how := _how(recording, rank))}
    by_exit = alike({rank: text for rank, text in told.items() if rank in recording.exits})[:4]
    ends = [Anomaly.of_ranks(Kind.ENDED, ranks, f"{some_ranks(ranks)}: {text}") for text, ranks in by_exit]
    waited = [row for row, (_, ranks) in zip(ends, by_exit, strict=True) if only_waited(recording, ranks[0])]
    unheard = alike({rank: text for rank, text in told.items() if rank not in recording.exits})
    gone = [Anomaly.of_ranks(Kind.ENDED_UNHEARD, ranks, f"{some_ranks(ranks)}, {text}") for text, ranks in unheard[:4]]
    first = [*own, *(row for row in ends if row not in waited)]
    apart = _apart(recording)
    rows = [*first, *lost, *waited, *gone] if first or apart else [*gone, *lost, *waited]
    rows = [*apart, *rows, *_reached(recording)] if rows else []
    if recording.code and recording.summaries and not rows:
        rows.append(
            Anomaly(Kind.ENDED, f"the command, with {exit_text(recording.code)}; no rank is known to have ended so")
        )
    return rows


def _reached(recording: Recording) -> list[Anomaly]:
    """How far ranks came, of a job that did not end well: the fewest ranks first."""
    told = {
        rank: one.progress.reached.text for rank, one in recording.summaries.items() if one.progress.reached is not None
    }
    came = alike(told)
    steps = {
        text: one.progress.reached.step
        for one in recording.summaries.values()
        if one.progress.reached and (text := told[one.rank])
    }
    return [
        Anomaly.of_ranks(Kind.REACHED, ranks, f"{some_ranks(ranks)}: {text}", steps[text]) for text, ranks in came[:4]
    ]


def _how(recording: Recording, rank: int) -> str:
    """Empty where it ended well, as far as is known."""
    code = recording.exits.get(rank)
    if code is not None:
        after = ", most likely sent by its launcher after another had ended" if only_waited(recording, rank) else ""
        return f"{exit_text(code)}{after}" if code else ""
    if recording.summaries[rank].progress.ended:
        return ""
    if recording.code == 0:
        return "exit not reported; the command ended with exit code 0"
    another = recording.code and any(
        one.progress.ended == "raised" and not lost_a_peer(one.progress.error) for one in recording.summaries.values()
    )
    return "most likely killed by its launcher after another raised" if another else "killed or still running"


def _last(recording: Recording, rank: int) -> str:
    if recording.summaries[rank].progress.ended:
        return "Python had begun to end by itself"
    last = recording.last.get(rank)
    if last is None:
        own = " over a group that torch has ranks of" if recording.summaries[rank].groups.own else ""
        return f"before any collective{own}"
    return _issued(last)


def _by_hand(error: str) -> bool:
    return error.startswith("KeyboardInterrupt")


def _interrupted(recording: Recording, ranks: Sequence[int]) -> list[Anomaly]:
    """Group ranks by their last collective, for a job that hangs is often ended so. A rank that waits is one ahead."""
    lasts = {rank: recording.summaries[rank].progress.last for rank in ranks}
    found = alike({rank: _issued(last) if last else "" for rank, last in lasts.items()})
    return [
        Anomaly.of_ranks(Kind.INTERRUPTED, ranks, f"{some_ranks(ranks)}, as by Ctrl-C{'; ' * bool(text)}{text}")
        for text, ranks in found[:4]
    ]


def _waits(recording: Recording) -> list[Anomaly]:
    """Ranks that others waited for, in a job that was ended from outside or by what came of it; first the one that went on to
    another group than all its peers."""
    odd = {} if different_calls(recording) else issued_otherwise(recording)
    rows = [
        Anomaly.of_ranks(Kind.CALLS_DIFFER, [rank], f"rank {rank} {text}")
        for rank, text in odd.items()
        if len(odd) == 1
    ]
    for one in waits(recording)[:4]:
        what = f"{one.last.text} over {ranks_text(one.last.ranks)}, number {one.last.seq} of that group"
        rows.append(
            Anomaly.of_ranks(
                Kind.WAITED_FOR, one.behind, f"{some_ranks(one.behind)}, by {some_ranks(one.ahead)} in {what}"
            )
        )
    return rows


def _apart(recording: Recording) -> list[Anomaly]:
    """Members that issued different collectives under one number of a group, in a job that did not end well. What they then
    raise or wait for follows from it."""
    rows = []
    for one in different_calls(recording)[:2]:
        kinds = " and ".join(f"{text} on {some_ranks(ranks)}" for text, ranks in one.issued[:3])
        ranks = [rank for _, ranks in one.issued for rank in ranks]
        rows.append(
            Anomaly.of_ranks(Kind.CALLS_DIFFER, ranks, f"number {one.number} over {ranks_text(one.members)} is {kinds}")
        )
    return rows


def _issued(last: Last) -> str:
    over = f" over {ranks_text(last.ranks)}" * bool(last.ranks)  # of a new group, ranks may not be on record
    return f"last collective: {last.text}{over}, number {last.seq} of that group"


def _raised(error: str, ranks: Sequence[int]) -> Anomaly:
    return Anomaly.of_ranks(Kind.RAISED, ranks, f"{some_ranks(ranks)}: {GLOO.sub('', error)}")


def _order(summaries: Sequence[Summary]) -> list[Anomaly]:
    if any(not one.progress.ended or one.progress.ended == "raised" for one in summaries):
        return []  # who ended early issued less, and that is said
    wrong = out_of_order(summaries)
    shown = " ".join(ranks_text(ranks) for _, ranks in wrong[:3])
    members = {rank for _, ranks in wrong for rank in ranks}
    text = f"members of {shown} issued different collectives, or in another order"
    return [Anomaly.of_ranks(Kind.ORDER, members, text)] if wrong else []


def _separate(summaries: Sequence[Summary]) -> list[Anomaly]:
    """The worst effect of a wrong mesh, which no check of a layout shows."""
    found = separate_models(summaries)
    if found is None or (found.own and any(one.equal for one in partly_equal(summaries))):
        return []
    more = f" and {len(found.sets) - 2} more sets of ranks" if len(found.sets) > 2 else ""
    sets = " and ".join(ranks_text(ranks) for ranks in found.sets[:2]) + more
    text = (
        f"nothing reduces gradients between {sets}: no collective joins them in forward or backward of step "
        f"{summaries[0].shown}, and none outside moves as much"
    )
    held = f"{some_ranks(found.ranks)} held the same before the first step, and other bytes after step {found.step}"
    if found.own:
        text = f"no collective over a group that torch has ranks of joins {sets}; what own groups join is not recorded"
    return [
        Anomaly.of_ranks(
            Kind.NOT_KEPT_EQUAL if found.own else Kind.SEPARATE_MODELS, found.ranks, f"{text}; {held}", found.step
        )
    ]


def _untrained(summaries: Sequence[Summary]) -> list[Anomaly]:
    """No gradient on any rank, in any step on record; an optimizer that takes them from elsewhere changes the parameters."""
    if not summaries or not all(
        one.contents.idle_steps and len({*one.contents.by_step.values()}) == 1 for one in summaries
    ):
        return []
    if any({*one.contents.by_step} != {0, *one.contents.idle_steps} for one in summaries):
        return []
    when = steps_text(summaries[0].contents.idle_steps)
    held = "parameters hold what they held before the first step"
    text = f"optimizers found no gradient in {when}, in any parameter of any rank; {held}"
    return [Anomaly.of_ranks(Kind.NOT_TRAINED, (one.rank for one in summaries), text)]


def _replicas(summaries: Sequence[Summary]) -> list[Anomaly]:
    local = [
        Anomaly.of_ranks(Kind.NOT_AVERAGED, (one.rank for one in family), _not_averaged(family))
        for family in not_averaged(replicas(summaries))[:1]
    ]
    own = [family for family in replicas(summaries) if not local_by(family)]
    same = ((own, "the same parts as"), (copied(summaries), "copies of the same parameters as"))
    for families, what in same:
        for step, apart in differing(families).items():
            most, others = apart[0]
            many = f" (in {len(apart)} sets of replicas)" if len(apart) > 1 else ""
            s = "s" * (len(others) == 1)
            text = f"{some_ranks(others)} claim{s} {what} {some_ranks(most)}, and hold{s} other bytes after step {step}{many}"
            family = next(family for family in families if {one.rank for one in family} >= {*most, *others})
            return [
                Anomaly.of_ranks(Kind.REPLICAS_DIFFER, others, text + _from_the_start(family, (*most, *others)), step),
                *local,
            ]
    return local


def _not_averaged(family: Sequence[Summary]) -> str:
    steps = steps_text(tuple(sorted({step for one in family for step in one.contents.by_step if step})))
    who = some_ranks(one.rank for one in family)
    return f"{who} train locally by {local_by(family)}, and are not the same again after any of {steps}"


def _partly(summaries: Sequence[Summary]) -> list[Anomaly]:
    """An optimizer that shares what it steps on, and leaves the rest or all alone; parameters of one rank look like that, too.
    If nothing joins the ranks, `_separate` says so already."""
    rows, separate = [], separate_models(summaries)
    for one in partly_equal(summaries)[:2]:
        if one.equal:
            text = f"{names_text(one.equal)} stayed equal, {names_text(one.differ)} did not"
            text = f"{some_ranks(one.ranks)} began alike; {text}: nothing reduces the latter, or they are a rank's own"
            rows.append(Anomaly.of_ranks(Kind.PARTLY_EQUAL, one.ranks, text))
        elif separate is None:
            text = f"{some_ranks(one.ranks)} began alike, and {names_text(one.differ)} became unlike"
            rows.append(
                Anomaly.of_ranks(
                    Kind.NOT_KEPT_EQUAL, one.ranks, f"{text}: nothing keeps them equal, or they are a rank's own"
                )
            )
    return rows


def _from_the_start(summaries: Sequence[Summary], ranks: Sequence[int]) -> str:
    """Whether they were made unlike each other, or became so; and whether something averages them, as local SGD does."""
    family = [one for one in summaries if one.rank in ranks]
    first = [one.contents.by_step.get(0) for one in family]
    again = f"; the same again after {steps_text(steps)}" if (steps := averaged(family)) else ""
    if None in first:
        return again
    return (
        "; not all that these ranks held was the same before the first step"
        if len(set(first)) > 1
        else "; before the first step they held the same"
    ) + again


def _not_finite(summaries: Sequence[Summary]) -> list[Anomaly]:
    steps = sorted({step for one in summaries for step in one.contents.not_finite})
    if not steps:
        return []
    bad = {one.rank: one.contents.not_finite[steps[0]] for one in summaries if steps[0] in one.contents.not_finite}
    names = list(dict.fromkeys(name for names in bad.values() for name in names))
    when = f"after step {steps[0]}" if steps[0] else "before the first step"
    text = f"{names_text(names)} {when}, on {some_ranks(bad)}"
    return [Anomaly.of_ranks(Kind.NOT_FINITE, bad, text, steps[0])]
