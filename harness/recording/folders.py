"""Folders in which the processes of a recorded command leave their evidence: one for each job that numbers its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

JOB_FILE = "job"
"""The file that names a job, in its folder of processes."""
JOBS_FOLDER = "jobs"
"""The folder of all jobs but the first."""
MOST_JOBS = 1000
"""Jobs of one command that are told apart."""


def job_folders(directory: Path) -> Iterator[Path]:
    """Yield the folders of jobs in the order in which they begin, MOST_JOBS in all, whether or not they exist.

    The first job's is the recording itself.
    """
    yield directory
    yield from (directory / JOBS_FOLDER / str(number) for number in range(2, MOST_JOBS + 1))
