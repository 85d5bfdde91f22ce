"""The rows of a recording's page on jobs of one command that have rank numbers of their own, such as replica groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from harness.core.evidence.text import ranks_text
from harness.recording.judged.stored_recording import Recording

MOST = 6


def job_rows(recording: Recording) -> list[tuple[str, str]]:
    """Each in a line, and what those that ran the same steps hold in common. None where there is one job."""
    jobs = [recording, *recording.others]
    if len(jobs) == 1:
        return []
    first = f"{len(jobs)} jobs have rank numbers of their own; the rows below are of job 1"
    rows = [f"job {number}: {_job(jobs, number)}" for number in range(1, min(len(jobs), MOST) + 1)]
    more = [f".. and {len(jobs) - MOST} more"] if len(jobs) > MOST else []
    show = f"`harness report {recording.others[0].directory}` shows job 2"
    return [("jobs", first), *(("", text) for text in (*rows, *more, *_contents(jobs), show))]


def _job(jobs: Sequence[Recording], number: int) -> str:
    job = jobs[number - 1]
    ranks = sorted(job.summaries)
    steps = max((one.steps_seen for one in job.summaries.values()), default=0)
    least = "" if all(one.ended for one in job.summaries.values()) else "at least "
    said = f"{ranks_text(ranks)} of {job.world or '?'}, {least}{steps} steps, {_end(job)}"
    before = [other for other, one in enumerate(jobs[: number - 1], start=1) if one.job == job.job]
    again = f"; as job {before[-1]}, in other processes{_came_back(jobs[before[-1] - 1])}" if before else ""
    return " ".join(filter(None, (job.job, said))) + again


def _end(job: Recording) -> str:
    """How its ranks ended, as far as they say."""
    ends = {one.ended or "unheard" for one in job.summaries.values()}
    words = {"ok": "ended by themselves", "raised": "raised", "unheard": "killed or still running"}
    return ", ".join(words.get(end, end) for end in sorted(ends)) or "no evidence"


def _came_back(before: Recording) -> str:
    return "" if all(one.ended == "ok" for one in before.summaries.values()) else ": it had left, and came back"


def _contents(jobs: Sequence[Recording]) -> list[str]:
    """Say which jobs hold the same bytes in the last step that all recorded. Each counts its own steps."""
    held: dict[tuple[int, ...], list[int]] = defaultdict(list)
    steps = [{step for one in job.summaries.values() for step in one.contents} for job in jobs]
    last = max(set.intersection(*steps), default=None)
    if last is None:
        return []
    for number, job in enumerate(jobs, start=1):
        held[tuple(one.contents.get(last, 0) for _, one in sorted(job.summaries.items()))].append(number)
    sets = " and ".join(f"jobs {ranks_text(tuple(numbers))}" for numbers in held.values() if len(numbers) > 1)
    when = f"after step {last} of each" if last else "before the first step of each"
    return [f"{when}, {sets or 'no two jobs'} hold the same bytes"]
