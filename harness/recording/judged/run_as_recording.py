"""A run of a case in the words of a recording: what its ranks held and moved, with nothing of what was requested.

So runs and recordings are compared alike. What only a recorder looks at, optimizers' settings and classes of models, is empty.
"""

from __future__ import annotations

from pathlib import Path

from harness.core.evidence.glance import record_without_digests
from harness.core.evidence.records import Run
from harness.core.evidence.summary import summary_of
from harness.recording.judged.stored_recording import Recording


def recording_of_run(run: Run) -> Recording:
    """Return the run of a case as a recording.

    Digests of contents are left out; an exit code of the command is not known.
    """
    how = {rank_exit.rank: rank_exit.how for rank_exit in run.exits}
    summaries = {
        rank: summary_of(record_without_digests(evidence, how.get(rank, ""))) for rank, evidence in run.ranks.items()
    }
    return Recording(Path(run.directory), summaries, requested=run.world_size, unreadable=dict(run.unreadable))
