"""A user's command run as some ranks of a world, each alone: no adapter, judged by the checks of recordings."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from harness.clusters.judging import Verdicts, run_of_lone_ranks
from harness.clusters.launches import TIMEOUT_REASON
from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.causes.facts import process_failed
from harness.core.causes.request import neighbours
from harness.core.checks import judge
from harness.core.evidence.recording import RankRecord, load_record, record_file
from harness.core.evidence.records import Exit
from harness.core.judge.trial import Trial
from harness.recording import injection
from harness.recording.judged.recorded import trial_of

STEPS = "1-3"
"""What of a command's training is recorded; with the step that follows a rank's process ends."""
ALONE_VARIABLE = "HARNESS_RECORD_ALONE"
"""Variable: of how many ranks the command's process is one."""
LISTENER_MODULE = "harness.clusters.scripted"


@dataclass(frozen=True)
class CommandRun:
    """A command that was run once for each of some ranks."""

    directory: Path
    """The recording."""
    exit_codes: Mapping[int, int]
    """Rank -> exit code of its process."""
    records: Mapping[int, RankRecord]
    """Rank -> its record, of ranks that left one."""
    unable_reasons: Mapping[int, str]
    """Rank -> why it could not be run alone."""
    seconds: float
    """Seconds for all of them."""


def run_command_alone(
    words: Sequence[str],
    ranks: Sequence[int],
    world: int,
    directory: Path,
    at_once: int | None = None,
    timeout: float = 600.0,
) -> CommandRun:
    """Run the command once for each rank, recorded into a fresh `directory`, and return exit codes and records.

    timeout: seconds for one rank, which is then killed and counts as not able to run. at_once: None means one per core.
    Raises injection.CommandError and EvidenceError.
    """
    began = time.monotonic()
    injection.make_fresh_folder(directory)

    def alone(rank: int) -> int:
        """Run the command as one rank and return its exit code; minus SIGKILL, with the reason in a file, if it took
        too long."""
        environment = dict(launcher_variables(rank, world)) | {
            injection.LISTENER_VARIABLE: LISTENER_MODULE,
            ALONE_VARIABLE: str(world),
        }
        log = log_file(directory, rank)
        try:
            return injection.run_recorded_command(
                words, directory, STEPS, extra_environment=environment, log=log, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            unable_file(directory, rank).write_text(TIMEOUT_REASON.format(timeout), encoding="utf-8")
            return -signal.SIGKILL

    with ThreadPoolExecutor(at_once or os.cpu_count() or 1) as pool:
        codes = dict(zip(ranks, pool.map(alone, ranks), strict=True))
    records = {rank: load_record(file) for rank in ranks if (file := record_file(directory, rank)).exists()}
    unable = {
        rank: file.read_text(encoding="utf-8") for rank in ranks if (file := unable_file(directory, rank)).exists()
    }
    return CommandRun(directory, codes, records, unable, time.monotonic() - began)


def launcher_variables(rank: int, world: int) -> Iterator[tuple[str, str]]:
    """Yield the variables, name and value, that a launcher sets for a rank, on machines of one rank."""
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29500}
    yield from ((name, str(number)) for name, number in variables.items())
    yield "MASTER_ADDR", "localhost"


def unable_file(directory: Path, rank: int) -> Path:
    """Return the file with the reason why a rank of a command could not be run alone."""
    return directory / injection.PROCESSES_FOLDER / f"rank_{rank:05d}.unable"


def log_file(directory: Path, rank: int) -> Path:
    """Return the file with the output of a rank's process."""
    return directory / f"rank_{rank:05d}.log"


def judge_command(run: CommandRun, dims: ParallelDims) -> Verdicts:
    """Return the results of the checks on a command's ranks, and the cause of what fails."""
    trial = trial_of_command(run, dims)
    results = judge(trial)
    return Verdicts(trial, results, diagnose(trial, results, (neighbours,), (process_failed,), costly=()))


def trial_of_command(run: CommandRun, dims: ParallelDims) -> Trial:
    """Return the trial of a command's ranks, as of a recording. dims: the layout that they are judged by."""
    trial = trial_of(run.records, dims, str(run.directory), dims.world_size)
    exits = tuple(exit_of_rank(run, exit) for exit in trial.run.exits if exit.rank in run.exit_codes)
    return replace(trial, run=run_of_lone_ranks(replace(trial.run, exits=exits), [*run.exit_codes], run.unable_reasons))


def exit_of_rank(run: CommandRun, exit: Exit) -> Exit:
    """Return how a rank's process ended: `exit`, from its record, if that says raised, or says ok and the exit code is 0.

    Else the code decides: ok for 0, otherwise raised, with the log's last line as the error.
    """
    code = run.exit_codes[exit.rank]
    if exit.how == "raised" or (exit.how == "ok" and code == 0):
        return exit
    if code == 0:
        return Exit(exit.rank, "ok", 0)
    lines = log_file(run.directory, exit.rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return Exit(exit.rank, "raised", code, error=lines[-1][:300] if lines else f"exit code {code}", blamed=True)
