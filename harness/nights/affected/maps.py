"""What each case ran, on disk: a folder of CASE.json files, one for each case, of one commit of the trainer's repository."""

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
    """What one case ran, and of what."""

    case: dict[str, Any]  # its definition, as JSON
    trainer: str  # its name
    commit: str  # of the trainer's repository, whole
    functions: Mapping[str, frozenset[str]]  # by file, the functions that its ranks called
    imported: frozenset[str]  # files that its ranks imported
    shared: frozenset[str]  # files whose functions may have run unseen, as in the harness's own process
    lost: str = ""  # why functions may be missing here; then every one counts
    shell: bool = True  # whether a rank started a shell; then scripts count

    @classmethod
    def of(cls, path: Path) -> CaseMap:
        """Raises CaseError for a file that is none."""
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
        """Complete or absent. Raises EvidenceError where something else lies there."""
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
    """Return whether a text is a map's."""
    return has_keys(text, frozenset({"case", "trainer", "commit", "functions", "imported"}))


def file_of(folder: Path, case: str) -> Path:
    """Return the file of a case in a folder of maps."""
    return folder / f"{case}.json"


def merged(seen: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one value of what several ranks saw, as `FunctionRecorder.stop` returns it."""
    functions: dict[str, set[str]] = {}
    imported: set[str] = set()
    lost, shell = "", False
    for one in seen:
        for file, names in one["functions"].items():
            functions.setdefault(file, set()).update(names)
        imported.update(one["imported"])
        lost, shell = lost or one["lost"], shell or one["shell"]
    return {"functions": functions, "imported": imported, "lost": lost, "shell": shell}
