"""Why a job hung, on a page: who is to blame, which groups wait and for whom, and what torch's own analyzer says."""

from __future__ import annotations

from typing import Any

from harness.core.evidence.text import counted, some_ranks
from harness.core.launch.sequences import describe
from harness.core.report.text import Rows
from harness.recording.pages.recording_page import table_of
from harness.recording.traces.analyzer import Analysis
from harness.recording.traces.hang import Hang, Stuck

MOST = 8


def hang_page(hang: Hang, said: Analysis, where: object) -> str:
    title = f"{where}: {counted(len(hang.dumped), 'Flight Recorder dump')}"
    return "\n".join([f"{hang.verdict} {_head(hang)}", *table_of(_rows(hang, said)), "", title])


def _head(hang: Hang) -> str:
    if hang.blamed:
        return f"hung: {some_ranks(hang.blamed)} to blame"
    if hang.stuck:
        return "hung: no rank is known to be the cause"
    return "no collective that is not over"


def _rows(hang: Hang, said: Analysis) -> Rows:
    rows: Rows = [(f"rank {rank}", why) for rank, why in list(hang.blamed.items())[:MOST]]
    rows += [("waits", _waits(one)) for one in hang.stuck[:MOST]]
    rows += [("", f".. and {len(hang.stuck) - MOST} more groups")] * (len(hang.stuck) > MOST)
    if hang.missing:
        rows.append(("no dump", f"of {some_ranks(hang.missing)}"))
    return [*rows, ("torch's own", compared(hang, said))]


def _waits(one: Stuck) -> str:
    text = f"{describe(one.call)}: issued by {some_ranks(one.issued)}"
    text += f", not by {some_ranks(one.behind)}" if one.behind else ""
    text += f"; not known of {some_ranks(one.untold)}" if one.untold else ""
    return text if one.behind or one.untold else f"{text}, all of its members, and nothing came through between them"


def compared(hang: Hang, said: Analysis) -> str:
    """Say whether torch's analyzer names the same ranks."""
    if said.failed:
        return f"analyzer says nothing: {said.failed}"
    names = some_ranks(said.ranks) if said.ranks else "no rank"
    if {*said.ranks} == {*hang.blamed}:
        return f"analyzer agrees: it names {names}"
    return f"analyzer disagrees: it names {names}" + (f" ({said.text})" if said.text else "")


def hang_document(hang: Hang, said: Analysis, where: object) -> dict[str, Any]:
    """Return the same as data."""
    return {
        "directory": where,
        "dumped": hang.dumped,
        "missing": hang.missing,
        "verdict": hang.verdict,
        "blamed": [{"rank": rank, "why": why} for rank, why in hang.blamed.items()],
        "waits": [
            {
                "group": one.call.ranks,
                "name": one.call.group,
                "collective": one.call.op,
                "number": one.call.seq,
                "issued": one.issued,
                "behind": one.behind,
                "untold": one.untold,
            }
            for one in hang.stuck
        ],
        "analyzer": {"ranks": said.ranks, "failed": said.failed, "agrees": {*said.ranks} == {*hang.blamed}},
    }
