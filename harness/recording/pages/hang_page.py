"""The page on a job that hung: who is to blame, which groups wait and for whom, and what torch's own analyzer says."""

from __future__ import annotations

from typing import Any

from harness.core.blame.calls import describe_call
from harness.core.blame.waits import GroupWait
from harness.core.evidence.text import count_text, some_ranks_text
from harness.core.report.text import Rows
from harness.recording.pages.recording_page import wrapped_table
from harness.recording.traces.analyzer import Analysis
from harness.recording.traces.hang import Hang

MOST_GROUPS = 8


def hang_page(hang: Hang, analysis: Analysis, directory: object) -> str:
    """Return the page as text: the verdict, ranks to blame, groups that wait, and what torch's analyzer names."""
    title = f"{directory}: {count_text(len(hang.dumped), 'Flight Recorder dump')}"
    return "\n".join([f"{hang.verdict} {_headline(hang)}", *wrapped_table(_hang_rows(hang, analysis)), "", title])


def _headline(hang: Hang) -> str:
    """Return in a sentence which ranks are to blame, that none is known, or that no collective is unfinished."""
    if hang.blamed:
        return f"hung: {some_ranks_text(hang.blamed)} to blame"
    if hang.stuck:
        return "hung: no rank is known to be the cause"
    return "no collective that is not over"


def _hang_rows(hang: Hang, analysis: Analysis) -> Rows:
    """Return the rows on ranks to blame, groups that wait, ranks without a dump, and torch's analyzer.

    At most MOST_GROUPS ranks and as many groups.
    """
    rows: Rows = [(f"rank {rank}", why) for rank, why in list(hang.blamed.items())[:MOST_GROUPS]]
    rows += [("waits", _waiting_text(group)) for group in hang.stuck[:MOST_GROUPS]]
    if len(hang.stuck) > MOST_GROUPS:
        rows.append(("", f".. and {len(hang.stuck) - MOST_GROUPS} more groups"))
    if hang.missing:
        rows.append(("no dump", f"of {some_ranks_text(hang.missing)}"))
    return [*rows, ("torch's own", analyzer_text(hang, analysis))]


def _waiting_text(group: GroupWait) -> str:
    """Return the text on a group that waits: which ranks issued the collective, which did not, and of which it is
    not known."""
    text = f"{describe_call(group.call)}: issued by {some_ranks_text(group.issued)}"
    text += f", not by {some_ranks_text(group.behind)}" if group.behind else ""
    text += f"; not known of {some_ranks_text(group.unknown_ranks)}" if group.unknown_ranks else ""
    return (
        text
        if group.behind or group.unknown_ranks
        else f"{text}, all of its members, and nothing came through between them"
    )


def analyzer_text(hang: Hang, analysis: Analysis) -> str:
    """Return whether torch's analyzer names the same ranks as are blamed here, in words; or why it says nothing."""
    if analysis.failed:
        return f"analyzer says nothing: {analysis.failed}"
    names = some_ranks_text(analysis.ranks) if analysis.ranks else "no rank"
    if {*analysis.ranks} == {*hang.blamed}:
        return f"analyzer agrees: it names {names}"
    return f"analyzer disagrees: it names {names}" + (f" ({analysis.text})" if analysis.text else "")


def hang_document(hang: Hang, analysis: Analysis, directory: object) -> dict[str, Any]:
    """Return the same as data for JSON: verdict, ranks to blame with reasons, groups that wait, and the analyzer's ranks."""
    return {
        "directory": directory,
        "dumped": hang.dumped,
        "missing": hang.missing,
        "verdict": hang.verdict,
        "blamed": [{"rank": rank, "why": why} for rank, why in hang.blamed.items()],
        "waits": [
            {
                "group": group.call.ranks,
                "name": group.call.group,
                "collective": group.call.op,
                "number": group.call.seq,
                "issued": group.issued,
                "behind": group.behind,
                "untold": group.unknown_ranks,
            }
            for group in hang.stuck
        ],
        "analyzer": {"ranks": analysis.ranks, "failed": analysis.failed, "agrees": {*analysis.ranks} == {*hang.blamed}},
    }
