"""Maps on disk of what each case ran: a folder of CASE.json files.

There is one file for each case, of one commit of the trainer's repository.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.case.case import CaseError
from harness.core.evidence.own_folders import has_keys, replace_own
from harness.core.evidence.reading import read_json


@dataclass(frozen=True)
class CaseMap:
    """The functions and files that one case ran, at one commit of the trainer's repository."""

    case: dict[str, Any]  # its definition, as JSON
    trainer: str  # its name
    commit: str  # of the trainer's repository, whole
    functions: Mapping[str, frozenset[str]]  # by file, the functions that its ranks called
    imported: frozenset[str]  # files that its ranks imported
    shared: frozenset[str]  # files whose functions may have run unseen, as in the harness's own process
    lost: str = ""  # why functions may be missing here; then every one counts
    shell: bool = True  # whether a rank started a shell; then scripts count

    @classmethod
    def load(cls, path: Path) -> CaseMap:
        """Return the map in a file. Raises CaseError if its JSON is no map, and OSError or ValueError if it is no JSON."""
        value = read_json(path)
        try:
            return cls(
                value["case"],
                value["trainer"],
                value["commit"],
                {file: frozenset(names) for file, names in value["functions"].items()},
                frozenset(value["imported"]),
                frozenset(value["shared"]),
                value["lost"],
                value["shell"],
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise CaseError(f"{path}: no map of a case; delete it") from error

    def save(self, path: Path) -> None:
        """Write the map as JSON, complete or not at all. Raises EvidenceError if the path holds something other than a map."""
        value = {
            "case": self.case,
            "trainer": self.trainer,
            "commit": self.commit,
            "functions": {file: sorted(names) for file, names in sorted(self.functions.items())},
            "imported": sorted(self.imported),
            "shared": sorted(self.shared),
            "lost": self.lost,
            "shell": self.shell,
        }
        replace_own(path, json.dumps(value, indent=1), is_map)


def is_map(text: str) -> bool:
    """Return whether a file's text is a map that this harness wrote."""
    return has_keys(text, frozenset({"case", "trainer", "commit", "functions", "imported"}))


def map_file(folder: Path, case: str) -> Path:
    """Return the file of a case in a folder of maps."""
    return folder / f"{case}.json"


def merge_rank_records(rank_records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the union of records of several ranks, each as `FunctionRecorder.stop` returns it.

    The keys are "functions" {file: names}, "imported" (files), "lost" (the first reason, or empty) and "shell" (of any
    rank).
    """
    functions: dict[str, set[str]] = {}
    imported: set[str] = set()
    lost = ""
    shell = False
    for rank_record in rank_records:
        for file, names in rank_record["functions"].items():
            functions.setdefault(file, set()).update(names)
        imported.update(rank_record["imported"])
        lost = lost or rank_record["lost"]
        shell = shell or rank_record["shell"]
    return {"functions": functions, "imported": imported, "lost": lost, "shell": shell}
