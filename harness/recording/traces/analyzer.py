"""torch's own analyzer of Flight Recorder dumps, run beside. It loads pickles, so it gets plain values that were read here."""

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
SECONDS = 300
_NAMED = re.compile(r"Culprit rank (\d+)|missing ranks: \{([\d, ]*)\}")


@dataclass(frozen=True)
class Analysis:
    """What it says."""

    ranks: tuple[int, ...] = ()
    """Ranks that it names as missing or as culprits."""
    failed: str = ""
    """Why it says nothing; empty if it ran."""
    text: str = ""
    """The first lines that it printed."""


def analysis_of(dumps: Sequence[Dump]) -> Analysis:
    """Never raises: where it cannot run, that is the answer."""
    with tempfile.TemporaryDirectory() as folder:
        for dump in dumps:
            (Path(folder) / f"rank_{dump.rank}").write_bytes(pickle.dumps(_with_groups(dump, dumps), protocol=2))
        command = module_command(MODULE, folder, "-p", "rank_")
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Analysis(failed=f"it did not end: {error}")
    lines = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip() and "tabulate" not in line]
    if ran.returncode:
        return Analysis(failed=(lines or [f"exit code {ran.returncode}"])[-1])
    named = {int(rank) for one, some in _NAMED.findall("\n".join(lines)) for rank in re.findall(r"\d+", one or some)}
    return Analysis(tuple(sorted(named)), text="; ".join(lines[:3]))


def _with_groups(dump: Dump, dumps: Sequence[Dump]) -> Mapping[str, Any]:
    """Return what the file has, with the ranks of groups where it lists none."""
    if any(one.get("ranks") not in (None, "", "[]") for one in dump.plain.get("pg_config", {}).values()):
        return dump.plain
    about = {str(e["process_group"][0]): e["process_group"][-1] for each in dumps for e in each.plain["entries"]}
    ranks = {call.group: call.ranks for each in dumps for call in each.issued}
    groups = {n: {"name": n, "desc": about[n], "ranks": str([*of])} for n, of in ranks.items() if dump.rank in of}
    return {**dump.plain, "pg_config": groups}
