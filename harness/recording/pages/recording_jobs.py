"""The rows of a recording's page on jobs of one command that have rank numbers of their own, such as replica groups."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from harness.core.evidence.text import ranks_text
from harness.recording.judged.stored_recording import Recording

MOST_JOBS = 6


def job_rows(recording: Recording) -> list[tuple[str, str]]:
    """Return a row for each job, and which of them hold the same bytes. Empty if the command has one job.

    At most MOST_JOBS jobs are listed.
    """
    jobs = [recording, *recording.others]
    if len(jobs) == 1:
        return []
    introduction = f"{len(jobs)} jobs have rank numbers of their own; the rows below are of job 1"
    rows = [f"job {number}: {_job_text(jobs, number)}" for number in range(1, min(len(jobs), MOST_JOBS) + 1)]
    rest_texts = [f".. and {len(jobs) - MOST_JOBS} more"] if len(jobs) > MOST_JOBS else []
    hint = f"`harness report {recording.others[0].directory}` shows job 2"
    return [("jobs", introduction), *(("", text) for text in (*rows, *rest_texts, *_contents_lines(jobs), hint))]


def _job_text(jobs: Sequence[Recording], number: int) -> str:
    """Return a line on a job: its ranks, steps and end, and which earlier job of the same name it is again. number: from 1."""
    job = jobs[number - 1]
    ranks = sorted(job.summaries)
    steps = max((summary.progress.steps_seen for summary in job.summaries.values()), default=0)
    least = "" if all(summary.progress.ended for summary in job.summaries.values()) else "at least "
    description = f"{ranks_text(ranks)} of {job.world or '?'}, {least}{steps} steps, {_ending_text(job)}"
    earlier_numbers = [
        earlier_number
        for earlier_number, earlier_job in enumerate(jobs[: number - 1], start=1)
        if earlier_job.job == job.job
    ]
    again_text = (
        f"; as job {earlier_numbers[-1]}, in other processes{_came_back_text(jobs[earlier_numbers[-1] - 1])}"
        if earlier_numbers
        else ""
    )
    return " ".join(filter(None, (job.job, description))) + again_text


def _ending_text(job: Recording) -> str:
    """Return how the job's ranks ended, in words; "no evidence" if no rank left any."""
    ends = {summary.progress.ended or "unheard" for summary in job.summaries.values()}
    text_of_ending = {"ok": "ended by themselves", "raised": "raised", "unheard": "killed or still running"}
    return ", ".join(text_of_ending.get(end, end) for end in sorted(ends)) or "no evidence"


def _came_back_text(earlier_job: Recording) -> str:
    """Return that the job's processes had left and came back; empty if all of the earlier job's ranks ended well."""
    if all(summary.progress.ended == "ok" for summary in earlier_job.summaries.values()):
        return ""
    return ": it had left, and came back"


def _steps_with_contents(job: Recording) -> set[int]:
    return set(itertools.chain.from_iterable(summary.contents.by_step for summary in job.summaries.values()))


def _contents_lines(jobs: Sequence[Recording]) -> list[str]:
    """Return a line on which jobs hold the same bytes in the last step that all recorded.

    Empty if they have no step in common. Each job counts its own steps.
    """
    jobs_by_contents: dict[tuple[int, ...], list[int]] = defaultdict(list)
    steps = [_steps_with_contents(job) for job in jobs]
    last = max(set.intersection(*steps), default=None)
    if last is None:
        return []
    for number, job in enumerate(jobs, start=1):
        contents = tuple(summary.contents.by_step.get(last, 0) for _, summary in sorted(job.summaries.items()))
        jobs_by_contents[contents].append(number)
    sets = " and ".join(
        f"jobs {ranks_text(tuple(numbers))}" for numbers in jobs_by_contents.values() if len(numbers) > 1
    )
    when = f"after step {last} of each" if last else "before the first step of each"
    return [f"{when}, {sets or 'no two jobs'} hold the same bytes"]
