"""torch's own analyzer of Flight Recorder dumps, run as a process of its own.

It loads pickles, so it gets plain values that were read here.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.launch.python_path import module_command
from harness.recording.traces.dumps import Dump

MODULE = "torch.distributed.flight_recorder.fr_trace"
TIMEOUT_SECONDS = 300
_NAMED_RANKS = re.compile(r"Culprit rank (\d+)|missing ranks: \{([\d, ]*)\}")


@dataclass(frozen=True)
class Analysis:
    """What torch's analyzer reports of a job's dumps."""

    ranks: tuple[int, ...] = ()
    """Ranks that it names as missing or as culprits."""
    failed: str = ""
    """Why it says nothing; empty if it ran."""
    text: str = ""
    """The first lines that it printed."""


def analysis_of(dumps: Sequence[Dump]) -> Analysis:
    """Return the ranks that torch's analyzer names for these dumps, and the first lines that it printed.

    It runs as a subprocess on copies of the dumps in a temporary folder. If it cannot run, `failed` has the reason;
    nothing is raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        for dump in dumps:
            (Path(folder) / f"rank_{dump.rank}").write_bytes(pickle.dumps(_with_groups(dump, dumps), protocol=2))
        command = module_command(MODULE, folder, "-p", "rank_")
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Analysis(failed=f"it did not end: {error}")
    lines = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip() and "tabulate" not in line]
    if ran.returncode:
        return Analysis(failed=(lines or [f"exit code {ran.returncode}"])[-1])
    named_ranks = set[int]()
    for culprit, missing in _NAMED_RANKS.findall("\n".join(lines)):
        named_ranks.update(map(int, re.findall(r"\d+", culprit or missing)))
    return Analysis(tuple(sorted(named_ranks)), text="; ".join(lines[:3]))


def _with_groups(dump: Dump, dumps: Sequence[Dump]) -> Mapping[str, Any]:
    """Return the content of the dump's file.

    If it lists no ranks of its groups, they are added from the calls of all dumps.
    """
    if any(
        group_entry.get("ranks") not in (None, "", "[]") for group_entry in dump.plain.get("pg_config", {}).values()
    ):
        return dump.plain
    descriptions: dict[str, Any] = {}
    ranks_by_name: dict[str, tuple[int, ...]] = {}
    for other_dump in dumps:
        for entry in other_dump.plain["entries"]:
            descriptions[str(entry["process_group"][0])] = entry["process_group"][-1]
        for call in other_dump.issued:
            ranks_by_name[call.group] = call.ranks
    groups = {}
    for name, ranks in ranks_by_name.items():
        if dump.rank in ranks:
            groups[name] = {"name": name, "desc": descriptions[name], "ranks": str([*ranks])}
    return {**dump.plain, "pg_config": groups}
