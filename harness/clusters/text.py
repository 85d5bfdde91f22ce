"""The text of a pre-flight: which ranks were run, of how many the verdict is proven, and what was not judged."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence

from harness.clusters.chosen import ChosenRanks
from harness.clusters.commands import CommandRun
from harness.clusters.figures import layout_rows, rank_rows
from harness.clusters.judging import Verdicts
from harness.clusters.launches import LoneRun
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.evidence.text import bytes_text, count_text
from harness.core.judge.result import Verdict, verdict_of_all
from harness.core.report.cause_text import diagnosis_line, evidence_rows
from harness.core.report.finding_text import finding_sentence
from harness.core.report.text import label_lines, wrap_text
from harness.recording.pages.recording_layout import not_applicable_texts

SHOWN_RANKS = 4  # ranks of a line
NEVER_JUDGED = "numbers, samples, checkpoints, NCCL, what libraries keep on a GPU, time"


def preflight_text(
    case: Case,
    chosen: ChosenRanks,
    flown: LoneRun,
    verdicts: Verdicts,
    judging: float,
    *,
    set_aside: tuple[str, ...] = (),
    gpu: str = "H100",
) -> str:
    """Return the text of a case's pre-flight.

    judging: the seconds that plan and checks took. set_aside: parts of a configuration that were not run. gpu: the
    model whose memory is compared.
    """
    world = case.dims.world_size
    trial = verdicts.trial
    rows = [
        ("plan and checks", f"of {world:,} ranks, {judging:.0f} s"),
        ("ran alone", f"{count_text(len(flown.ranks), 'rank')}: {_chosen_text(chosen)}"),
        ("", f"{_duration_text(flown.seconds)}{_usage_text(flown)}"),
    ]
    if set_aside:
        rows.append(("not run", ", ".join(set_aside)))
    rows += [*rank_rows(flown, trial, gpu), *layout_rows(case, trial.plan, gpu)]
    lines = [f"preflight {case.dims}, {case.model.name}, sequence {case.training.seq_len:,}", *label_lines(rows)]
    return "\n".join([*lines, *_judgement_lines(len(flown.ranks), verdicts, world)])


def command_text(
    words: Sequence[str], dims: ParallelDims, chosen: ChosenRanks, run: CommandRun, verdicts: Verdicts
) -> str:
    """Return the text of a command's pre-flight."""
    rows = [
        (
            "ran alone",
            f"{count_text(len(run.exit_codes), 'rank')}: {_chosen_text(chosen)}; {_duration_text(run.seconds)}",
        ),
        ("logs", f"{run.directory}/rank_*.log"),
    ]
    first = wrap_text(f"preflight {dims}, {shlex.join(words)}", "")
    return "\n".join([*first, *label_lines(rows), *_judgement_lines(len(run.exit_codes), verdicts, dims.world_size)])


def _judgement_lines(ran: int, verdicts: Verdicts, world: int) -> list[str]:
    """Return the lines of the verdict, of each check, and of the things that were not judged.

    ran: number of ranks that were run.
    """
    return [*_verdict_lines(ran, verdicts, world), *label_lines(list(_not_judged_rows(ran, verdicts, world)))]


def _usage_text(flown: LoneRun) -> str:
    """Return the most processor time and memory that any rank's process took. Empty if no rank left evidence."""
    seconds = max((used.seconds for used in flown.usage_by_rank.values()), default=0)
    most_bytes = max((used.bytes for used in flown.usage_by_rank.values()), default=0)
    return f"; one of them {seconds:.0f} s of processor time, {bytes_text(most_bytes)}" if flown.usage_by_rank else ""


def _chosen_text(chosen: ChosenRanks) -> str:
    """Return the chosen ranks by reason, with the seed if some were drawn."""
    parts = (f"{reason} {_ranks_text(ranks)}" for reason, ranks in chosen.ranks_by_reason.items())
    return "   ".join(parts) + (f" (seed {chosen.seed})" if "drawn" in chosen.ranks_by_reason else "")


def _ranks_text(ranks: tuple[int, ...]) -> str:
    """Return the first ranks of a list, and how many there are."""
    return ",".join(map(str, ranks[:SHOWN_RANKS])) + (f",.. ({len(ranks)})" if len(ranks) > SHOWN_RANKS else "")


def _duration_text(seconds: float) -> str:
    """Return a duration in minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def headline(ran: int, verdicts: Verdicts, world: int) -> str:
    """Return the verdict with the number of ranks that it was proven on, "PASS for 12 of 4,096 ranks": never PASS alone."""
    return f"{verdict_of_all(verdicts.results)} for {ran:,} of {world:,} ranks"


def _verdict_lines(ran: int, verdicts: Verdicts, world: int) -> Iterator[str]:
    """Yield the lines of the verdict, its cause, the checks by verdict, and the first finding of each failing check."""
    checks_by_verdict = defaultdict(list)
    for result in verdicts.results:
        checks_by_verdict[result.verdict].append(result.check)
    yield from wrap_text(headline(ran, verdicts, world), "")
    if verdicts.diagnosis is not None:
        yield from wrap_text(diagnosis_line(verdicts.diagnosis), "  ")
        yield from label_lines(evidence_rows(verdicts.diagnosis.evidence))
    yield from label_lines(
        [
            (str(verdict), " ".join(checks_by_verdict[verdict]))
            for verdict in (Verdict.FAIL, Verdict.PASS)
            if checks_by_verdict[verdict]
        ]
    )
    yield from label_lines(
        [(result.check, finding_sentence(result.findings[0])) for result in verdicts.results if result.findings]
    )
    unknown = defaultdict(list)
    for result in verdicts.results:
        if result.verdict is Verdict.UNKNOWN:
            unknown[result.note].append(result.check)
    yield from label_lines([("UNKNOWN", f"{' '.join(checks)}: {note}") for note, checks in unknown.items()])


def _not_judged_rows(ran: int, verdicts: Verdicts, world: int) -> Iterator[tuple[str, str]]:
    """Yield rows (label, text) on checks that do not apply, and on the facts that no pre-flight judges."""
    yield from (("not applicable", text) for text in not_applicable_texts(verdicts.results))
    other_ranks = world - ran
    yield "not judged", NEVER_JUDGED + (f", {other_ranks:,} other ranks" if other_ranks else "")
