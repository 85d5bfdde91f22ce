"""Anomalies of a recording, whatever was requested, and the results of checks that follow from them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from harness.core.blame.calls import Issued
from harness.core.blame.culprits import blame_of
from harness.core.blame.divergence import find_different_calls
from harness.core.blame.waits import JobCalls
from harness.core.evidence.keys import ranks_key, steps_text
from harness.core.evidence.lost_peer import is_lost_peer_error
from harness.core.evidence.recording import Beside, Last, issued_text
from harness.core.evidence.records import IN_A_RING
from harness.core.evidence.summary import Summary
from harness.core.evidence.text import names_text, ranks_text, some_ranks_text
from harness.core.judge.finding import Finding
from harness.core.judge.local_training import (
    averaging_steps,
    find_partly_equal,
    local_training_means,
    never_averaged_families,
)
from harness.core.judge.observed import (
    copied_families,
    differing_by_step,
    families_of_replicas,
    find_differing_ranks,
    group_ranks_by,
    groups_out_of_order,
)
from harness.core.judge.result import Result, Verdict, verdict_of
from harness.core.judge.separate_models import find_separate_models
from harness.recording.judged.recorded_calls import rank_exits_of, ranks_by_text
from harness.recording.judged.stored_recording import Recording, exit_text, is_ended_by_launcher

GLOO = re.compile(r"\[/\S+\] |\. This is typically caused.*")


class Kind(StrEnum):
    """Kinds of anomalies; each value is the label that the page shows."""

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
    """One anomaly of a recorded job: its kind, a description, and the ranks and step that it is of."""

    label: Kind
    """Its kind, as the page has it."""
    text: str
    """Description of it, in words."""
    ranks: tuple[int, ...] = ()
    """Global ranks, ascending; empty where it is of no rank."""
    step: int | None = None
    """The training step, 0 before the first; None where it is of no step."""

    @classmethod
    def of_ranks(cls, label: Kind, ranks: Iterable[int], text: str, step: int | None = None) -> Anomaly:
        """Return the anomaly of these ranks, which may come in any order and more than once."""
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
    """Return what checks say of a recorded job, whatever was requested: `completed`, and those that have an anomaly.

    `completed` alone, UNKNOWN, if no rank left evidence; it passes if it has no anomaly.
    """
    if not recording.summaries:
        return [Result("completed", Verdict.UNKNOWN, note=recording.nothing)]
    by_check: dict[str, list[Anomaly]] = {"completed": []}
    for anomaly in find_anomalies(recording):
        by_check.setdefault(anomaly.check, []).append(anomaly)
    return [_result_of_anomalies(check, of_check, len(recording.summaries)) for check, of_check in by_check.items()]


def _result_of_anomalies(check: str, anomalies_of_check: Sequence[Anomaly], examined: int) -> Result:
    """Return the result of a check that has these anomalies: FAIL with a finding for each one that fails it.

    If none of them does, UNKNOWN with the first one's text. PASS if there are no anomalies. examined: number of ranks.
    """
    failing = [anomaly for anomaly in anomalies_of_check if anomaly.verdict is Verdict.FAIL]
    if anomalies_of_check and not failing:
        return Result(check, Verdict.UNKNOWN, examined, note=anomalies_of_check[0].text)
    findings = [
        Finding(ranks=anomaly.ranks, step=anomaly.step, quantity=anomaly.label.lower(), note=anomaly.text)
        for anomaly in failing
    ]
    return verdict_of(check, findings, examined)


def find_anomalies(recording: Recording) -> list[Anomaly]:
    """Return the anomalies of all jobs of a recording, the worst first within each job; empty if nothing is anomalous.

    The first job comes first. Texts of further jobs begin with "in job 2:". Their ranks without evidence are left out,
    for a process may be a rank again without others.
    """
    rows = _anomalies_of_job(recording)
    for number, job in enumerate(recording.others, start=2):
        for anomaly in _anomalies_of_job(job):
            if anomaly.label != Kind.NO_EVIDENCE:
                rows.append(replace(anomaly, text=f"in job {number}: {anomaly.text}"))
    return rows


def _anomalies_of_job(recording: Recording) -> list[Anomaly]:
    """Return the anomalies of one job, of all kinds, the worst first; empty if there are none.

    Two threads over one group come before exits if no rank raised, for each may wait for ever; else after them. At most
    four rows say what ranks have unlike most. Numbers of steps are no such row if a signal ended the command, which
    meets each rank in another step.
    """
    summaries = [summary for _, summary in sorted(recording.summaries.items())]
    two_threads = _two_thread_anomalies(summaries)
    # of two threads each may wait for ever
    no_rank_raised = all(summary.progress.ended != "raised" for summary in summaries)
    rows = [*_missing_evidence_anomalies(recording), *_recorder_anomalies(summaries)]
    if no_rank_raised:
        rows += two_threads
    rows += _exit_anomalies(recording)
    rows += _order_anomalies(summaries)
    if not no_rank_raised:
        rows += two_threads
    rows += _separate_model_anomalies(summaries)
    rows += _no_gradient_anomalies(summaries)
    rows += _replica_anomalies(summaries)
    rows += _partly_equal_anomalies(summaries)
    rows += _not_finite_anomalies(summaries)
    for odd in find_differing_ranks(summaries)[:4]:
        if odd.what != "steps" or (recording.code or 0) >= 0:  # a signal meets each rank in another step
            text = f"{odd.what} on {some_ranks_text(odd.ranks)}: {odd.theirs}; on most: {odd.most}"
            rows.append(Anomaly.of_ranks(Kind.UNLIKE_OTHERS, odd.ranks, text))
    return rows


def _missing_evidence_anomalies(recording: Recording) -> list[Anomaly]:
    """Return what is not on record: that no rank left evidence, which ranks left none, and at most two unreadable
    files.

    Empty if each rank left a file that can be read.
    """
    rows = [Anomaly(Kind.NO_EVIDENCE, recording.nothing)] if recording.nothing else []
    missing = sorted(set(range(recording.world)) - set(recording.summaries) - set(recording.unreadable))
    if missing and recording.summaries:
        text = f"from {some_ranks_text(missing)}: they ended before their first forward pass, or train nothing"
        rows.append(Anomaly.of_ranks(Kind.NO_EVIDENCE, missing, text))
    return rows + [Anomaly(Kind.UNREADABLE, text, (rank,)) for rank, text in list(recording.unreadable.items())[:2]]


def _recorder_anomalies(summaries: Sequence[Summary]) -> list[Anomaly]:
    """Return at most one anomaly: an error of the recorder itself, with the ranks that have it as their first one.

    Of several errors it is that of most ranks. What these ranks did after it is not on record. Empty if the recorder
    raised nowhere.
    """
    failed = group_ranks_by(summaries, lambda summary: next(iter(summary.recorder.failed), None))
    return [
        Anomaly.of_ranks(Kind.NOT_RECORDED, ranks, f"on {some_ranks_text(ranks)}: {text}")
        for text, ranks in list(failed.items())[:1]
    ]


def _two_thread_anomalies(summaries: Sequence[Summary]) -> list[Anomaly]:
    """Return one anomaly for each group over which several threads issue collectives at one time; empty if there is
    none.

    The text is that of the lowest rank that saw it.
    """
    uses_of_groups: dict[str, list[tuple[int, Beside]]] = defaultdict(list)
    for summary in summaries:
        for beside in summary.groups.beside:
            uses_of_groups[ranks_key(beside.ranks)].append((summary.rank, beside))
    rows = []
    for uses in uses_of_groups.values():
        ranks = [rank for rank, _ in uses]
        rows.append(Anomaly.of_ranks(Kind.TWO_THREADS, ranks, _threads_text(uses[0][1])))
    return rows


def _threads_text(beside: Beside) -> str:
    """Return which other threads issue which collectives over the group, and which ones the training thread issues
    there.

    At most two threads are named.
    """
    threads = ", ".join(beside.threads[:2])
    if len(beside.threads) > 2:
        threads += ", .."
    return (
        f"thread {threads} issues {', '.join(beside.ops)} over {ranks_text(beside.ranks)} while the thread that trains is at"
        f" work, and that one issues {', '.join(beside.trains)} over the same group ({beside.group}): nothing fixes their"
        " order"
    )


def _exit_anomalies(recording: Recording) -> list[Anomaly]:
    """Return how ranks ended that did not end well: raised, with their errors; died or exited; killed, and in which
    collective.

    Causes come before what follows from another rank's exit. How far ranks came is added at the end. Empty if all ended
    well. If the command failed and no rank is known to have, the one anomaly is the command's exit code.
    """
    raised = group_ranks_by(
        recording.summaries.values(),
        lambda summary: summary.progress.error if summary.progress.ended == "raised" else None,
    )
    ranks_of_errors = sorted(raised.items(), key=lambda item: is_lost_peer_error(item[0]))[:3]
    interrupted: list[int] = []
    for error, ranks in raised.items():
        if _is_by_hand(error):
            interrupted += ranks
    own = [
        _error_anomaly(error, ranks)
        for error, ranks in ranks_of_errors
        if not is_lost_peer_error(error) and not _is_by_hand(error)
    ]
    own += _interrupt_anomalies(recording, interrupted)
    peers = [rank for rank, summary in recording.summaries.items() if summary.progress.ended != "raised"]
    have_peers_ended = all(
        recording.summaries[rank].progress.ended == "ok" or is_ended_by_launcher(recording, rank) for rank in peers
    )
    # by peers that went on, or by each other
    all_were_left = raised and all(map(is_lost_peer_error, raised)) and have_peers_ended
    exit_texts: dict[int, str] = {}
    for rank in peers:
        if words := _exit_words(recording, rank):
            exit_texts[rank] = f"{words}; {_last_collective_text(recording, rank)}"
    has_ended_well = not raised and not exit_texts
    job = JobCalls([] if has_ended_well else rank_exits_of(recording, recording.world))
    if interrupted or all_were_left or (recording.code or 0) < 0:
        own += _wait_anomalies(job)
    lost = [_error_anomaly(error, ranks) for error, ranks in ranks_of_errors if is_lost_peer_error(error)]
    by_exit = ranks_by_text({rank: text for rank, text in exit_texts.items() if rank in recording.exits})[:4]
    ends = [Anomaly.of_ranks(Kind.ENDED, ranks, f"{some_ranks_text(ranks)}: {text}") for text, ranks in by_exit]
    waited = [row for row, (_, ranks) in zip(ends, by_exit, strict=True) if is_ended_by_launcher(recording, ranks[0])]
    unheard = ranks_by_text({rank: text for rank, text in exit_texts.items() if rank not in recording.exits})
    gone = [
        Anomaly.of_ranks(Kind.ENDED_UNHEARD, ranks, f"{some_ranks_text(ranks)}, {text}") for text, ranks in unheard[:4]
    ]
    first = [*own, *(row for row in ends if row not in waited)]
    different_calls = _different_call_anomalies(job)
    rows = [*first, *lost, *waited, *gone] if first or different_calls else [*gone, *lost, *waited]
    rows = [*different_calls, *rows, *_progress_anomalies(recording)] if rows else []
    if recording.code and recording.summaries and not rows:
        rows.append(
            Anomaly(Kind.ENDED, f"the command, with {exit_text(recording.code)}; no rank is known to have ended so")
        )
    return rows


def _progress_anomalies(recording: Recording) -> list[Anomaly]:
    """Return how far ranks came in a job that did not end well: one anomaly for each place, the fewest ranks first.

    At most four. Ranks whose place is unknown are left out.
    """
    progress_texts = {
        rank: summary.progress.reached.text
        for rank, summary in recording.summaries.items()
        if summary.progress.reached is not None
    }
    steps = {}
    for summary in recording.summaries.values():
        if summary.progress.reached and (text := progress_texts[summary.rank]):
            steps[text] = summary.progress.reached.step
    return [
        Anomaly.of_ranks(Kind.REACHED, ranks, f"{some_ranks_text(ranks)}: {text}", steps[text])
        for text, ranks in ranks_by_text(progress_texts)[:4]
    ]


def _exit_words(recording: Recording, rank: int) -> str:
    """Return how a rank ended that did not raise, such as "exit code 1" or "SIGKILL".

    Empty only if exit code 0 was reported, or no exit code and the rank recorded its own end. If neither is known, the text
    says what is likely, by the command's exit code and other ranks. Precondition: the rank has a summary.
    """
    code = recording.exits.get(rank)
    if code is not None:
        if not code:
            return ""
        by_launcher = is_ended_by_launcher(recording, rank)
        after = ", most likely sent by its launcher after another had ended" if by_launcher else ""
        return f"{exit_text(code)}{after}"
    if recording.summaries[rank].progress.ended:
        return ""
    if recording.code == 0:
        return "exit not reported; the command ended with exit code 0"
    if recording.code and recording.has_raised:
        return "most likely killed by its launcher after another raised"
    return "killed or still running"


def _last_collective_text(recording: Recording, rank: int) -> str:
    """Return the last collective of a rank that did not raise, in words; or that there was none, or that Python had
    begun to end."""
    if recording.summaries[rank].progress.ended:
        return "Python had begun to end by itself"
    last = recording.last.get(rank)
    if last is None:
        own = " over a group that torch has ranks of" if recording.summaries[rank].groups.own else ""
        return f"before any collective{own}"
    return _collective_text(last)


def _is_by_hand(error: str) -> bool:
    return error.startswith("KeyboardInterrupt")


def _interrupt_anomalies(recording: Recording, ranks: Sequence[int]) -> list[Anomaly]:
    """Return the ranks that KeyboardInterrupt ended, one anomaly for each last collective; at most four, the fewest
    ranks first.

    A job that hangs is often ended so: a rank that waits is one collective ahead. Empty if `ranks` is.
    """
    lasts = {rank: recording.summaries[rank].progress.last for rank in ranks}
    groups = ranks_by_text({rank: _collective_text(last) if last else "" for rank, last in lasts.items()})
    rows = []
    for last_text, ranks_of_text in groups[:4]:
        text = f"{some_ranks_text(ranks_of_text)}, as by Ctrl-C"
        if last_text:
            text += f"; {last_text}"
        rows.append(Anomaly.of_ranks(Kind.INTERRUPTED, ranks_of_text, text))
    return rows


def _wait_anomalies(job: JobCalls) -> list[Anomaly]:
    """Return ranks that others waited for, in a job that was ended from outside or by what came of it.

    A single rank that issued another collective than all its peers comes first, unless different calls are reported
    anyway. At most four waits follow. Empty if none is known.
    """
    rows = []
    waits = job.group_waits()
    blame = blame_of(job.exits)
    if not find_different_calls(job) and len(blame.reasons) == 1:
        for rank, text in blame.reasons.items():
            if text.startswith(IN_A_RING):
                rows.append(Anomaly.of_ranks(Kind.CALLS_DIFFER, [rank], f"rank {rank}: {text}"))
    for wait in waits[:4]:
        collective = (
            f"{_issued_text(wait.call)} over {ranks_text(wait.call.ranks)}, number {wait.call.seq} of that group"
        )
        text = f"{some_ranks_text(wait.behind)}, by {some_ranks_text(wait.waiting)} in {collective}"
        rows.append(Anomaly.of_ranks(Kind.WAITED_FOR, wait.behind, text))
    return rows


def _different_call_anomalies(job: JobCalls) -> list[Anomaly]:
    """Return one anomaly for each group whose members issued different collectives under one number; at most two.

    Empty if no group has any. In a job that did not end well, what members then raise or wait for follows from it.
    """
    rows = []
    for calls in find_different_calls(job)[:2]:
        kinds = " and ".join(f"{_issued_text(call)} on {some_ranks_text(ranks)}" for call, ranks in calls.kinds[:3])
        text = f"number {calls.seq} over {ranks_text(calls.members)} is {kinds}"
        rows.append(Anomaly.of_ranks(Kind.CALLS_DIFFER, calls.issued, text))
    return rows


def _issued_text(call: Issued) -> str:
    """Return a collective as a recording names it, without its number and group."""
    return issued_text(call.op, call.step, call.phase)


def _collective_text(last: Last) -> str:
    over = f" over {ranks_text(last.ranks)}" if last.ranks else ""  # of a new group, ranks may not be on record
    return f"last collective: {last.text}{over}, number {last.seq} of that group"


def _error_anomaly(error: str, ranks: Sequence[int]) -> Anomaly:
    return Anomaly.of_ranks(Kind.RAISED, ranks, f"{some_ranks_text(ranks)}: {GLOO.sub('', error)}")


def _order_anomalies(summaries: Sequence[Summary]) -> list[Anomaly]:
    """Return at most one anomaly: groups whose members issued different collectives, or in another order; three are
    named.

    Empty if all agree. Empty as well if some rank raised or was killed: it issued less, and other anomalies say so.
    """
    if any(not summary.progress.ended or summary.progress.ended == "raised" for summary in summaries):
        return []  # who ended early issued less, and that is said
    wrong = groups_out_of_order(summaries)
    if not wrong:
        return []
    group_texts = " ".join(ranks_text(ranks) for _, ranks in wrong[:3])
    members: set[int] = set()
    for _, ranks in wrong:
        members.update(ranks)
    text = f"members of {group_texts} issued different collectives, or in another order"
    return [Anomaly.of_ranks(Kind.ORDER, members, text)]


def _separate_model_anomalies(summaries: Sequence[Summary]) -> list[Anomaly]:
    """Return one anomaly if sets of ranks train separate models, as nothing reduces gradients between them; else empty.

    The kind is only NOT_KEPT_EQUAL if ranks have groups of their own, whose ranks torch does not list. In that case it
    is empty if some parameters stay equal. No check of a layout shows this worst effect of a wrong mesh.
    """
    separate = find_separate_models(summaries)
    if separate is None or (separate.own and any(partly.equal for partly in find_partly_equal(summaries))):
        return []
    further = f" and {len(separate.sets) - 2} more sets of ranks" if len(separate.sets) > 2 else ""
    sets = " and ".join(ranks_text(ranks) for ranks in separate.sets[:2]) + further
    kind = Kind.SEPARATE_MODELS
    text = (
        f"nothing reduces gradients between {sets}: no collective joins them in forward or backward of step "
        f"{summaries[0].shown}, and none outside moves as much"
    )
    if separate.own:
        kind = Kind.NOT_KEPT_EQUAL
        text = f"no collective over a group that torch has ranks of joins {sets}; what own groups join is not recorded"
    values_text = f"{some_ranks_text(separate.ranks)} held the same before the first step"
    values_text += f", and other bytes after step {separate.step}"
    return [Anomaly.of_ranks(kind, separate.ranks, f"{text}; {values_text}", separate.step)]


def _no_gradient_anomalies(summaries: Sequence[Summary]) -> list[Anomaly]:
    """Return one anomaly if no optimizer of any rank found a gradient in any recorded step, and no parameter changed;
    else empty.

    Parameters that change show that an optimizer takes gradients from elsewhere.
    """
    if not summaries:
        return []
    for summary in summaries:
        if not summary.contents.idle_steps or len({*summary.contents.by_step.values()}) != 1:
            return []
    if any({*summary.contents.by_step} != {0, *summary.contents.idle_steps} for summary in summaries):
        return []
    when = steps_text(summaries[0].contents.idle_steps)
    unchanged = "parameters hold what they held before the first step"
    text = f"optimizers found no gradient in {when}, in any parameter of any rank; {unchanged}"
    return [Anomaly.of_ranks(Kind.NOT_TRAINED, (summary.rank for summary in summaries), text)]


def _replica_anomalies(summaries: Sequence[Summary]) -> list[Anomaly]:
    """Return at most two anomalies: replicas that differ, and replicas that train locally and are never averaged.

    Of the former it is the first step after which they differ, of the latter the first set of replicas.
    """
    local = []
    for family in never_averaged_families(families_of_replicas(summaries))[:1]:
        ranks = [summary.rank for summary in family]
        local.append(Anomaly.of_ranks(Kind.NOT_AVERAGED, ranks, _not_averaged_text(family)))
    own = [family for family in families_of_replicas(summaries) if not local_training_means(family)]
    same = ((own, "the same parts as"), (copied_families(summaries), "copies of the same parameters as"))
    for families, claim in same:
        for step, differing in differing_by_step(families).items():
            majority, others = differing[0]
            several_sets = f" (in {len(differing)} sets of replicas)" if len(differing) > 1 else ""
            s = "s" if len(others) == 1 else ""
            text = f"{some_ranks_text(others)} claim{s} {claim} {some_ranks_text(majority)}"
            text += f", and hold{s} other bytes after step {step}{several_sets}"
            family = _family_of(families, {*majority, *others})
            text += _initial_equality_text(family, (*majority, *others))
            return [Anomaly.of_ranks(Kind.REPLICAS_DIFFER, others, text, step), *local]
    return local


def _family_of(families: Iterable[Sequence[Summary]], ranks: set[int]) -> Sequence[Summary]:
    """Return the first family that has all of these ranks. Raises AssertionError if none has."""
    for family in families:
        if ranks.issubset(summary.rank for summary in family):
            return family
    raise AssertionError(f"no family has all of the ranks {ranks}")


def _not_averaged_text(family: Sequence[Summary]) -> str:
    """Return which ranks train locally and by what means, and after which recorded steps they were not the same again."""
    recorded_steps: set[int] = set()
    for summary in family:
        recorded_steps.update(summary.contents.by_step)
    steps = steps_text(tuple(sorted(step for step in recorded_steps if step)))
    who = some_ranks_text(summary.rank for summary in family)
    return f"{who} train locally by {local_training_means(family)}, and are not the same again after any of {steps}"


def _partly_equal_anomalies(summaries: Sequence[Summary]) -> list[Anomaly]:
    """Return ranks that began equal, and of which some or all parameters became unequal: at most two sets.

    Empty if there are none. An optimizer that shares what it steps on, and leaves the rest or all alone, does that;
    parameters of one rank look like that, too. If nothing joins the ranks, `_separate_model_anomalies` says so already.
    """
    rows = []
    separate = find_separate_models(summaries)
    for partly in find_partly_equal(summaries)[:2]:
        who = some_ranks_text(partly.ranks)
        if partly.equal:
            text = f"{names_text(partly.equal)} stayed equal, {names_text(partly.differ)} did not"
            text = f"{who} began alike; {text}: nothing reduces the latter, or they are a rank's own"
            rows.append(Anomaly.of_ranks(Kind.PARTLY_EQUAL, partly.ranks, text))
        elif separate is None:
            text = f"{who} began alike, and {names_text(partly.differ)} became unlike"
            text += ": nothing keeps them equal, or they are a rank's own"
            rows.append(Anomaly.of_ranks(Kind.NOT_KEPT_EQUAL, partly.ranks, text))
    return rows


def _initial_equality_text(summaries: Sequence[Summary], ranks: Sequence[int]) -> str:
    """Return the end of a sentence: whether these ranks held the same before the first step, and after which steps they
    do again.

    Empty if what they held before the first step is not on record, and no step makes them equal again.
    """
    family = [summary for summary in summaries if summary.rank in ranks]
    first = [summary.contents.by_step.get(0) for summary in family]
    steps = averaging_steps(family)
    again = f"; the same again after {steps_text(steps)}" if steps else ""
    if None in first:
        return again
    if len(set(first)) > 1:
        return "; not all that these ranks held was the same before the first step" + again
    return "; before the first step they held the same" + again


def _not_finite_anomalies(summaries: Sequence[Summary]) -> list[Anomaly]:
    """Return at most one anomaly: the tensors with NaN or infinity in the first step that has any, and their ranks.

    Else empty.
    """
    all_steps: set[int] = set()
    for summary in summaries:
        all_steps.update(summary.contents.not_finite)
    if not all_steps:
        return []
    step = min(all_steps)
    names_of_ranks = {
        summary.rank: summary.contents.not_finite[step] for summary in summaries if step in summary.contents.not_finite
    }
    names: dict[str, None] = {}
    for names_of_rank in names_of_ranks.values():
        names.update(dict.fromkeys(names_of_rank))
    when = f"after step {step}" if step else "before the first step"
    text = f"{names_text(list(names))} {when}, on {some_ranks_text(names_of_ranks)}"
    return [Anomaly.of_ranks(Kind.NOT_FINITE, names_of_ranks, text, step)]
