"""The selection of the cases that a change can affect, with a reason for each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from harness import ROOT
from harness.core.case import case as requested
from harness.core.case.case import Case, CaseError
from harness.core.case.case_files import path_of
from harness.core.case.trainer_repository import repository_of
from harness.core.evidence.git import run_git
from harness.nights.affected.maps import CaseMap, map_file
from harness.nights.affected.sources import SourceChanges, changes_between


@dataclass(frozen=True)
class AffectedCases:
    """The cases that can be affected, of those that were requested, and the reason of each."""

    cases: tuple[Case, ...]
    reasons: dict[str, str]  # by name
    requested_count: int  # how many cases were looked at
    base: str

    def sentence(self) -> str:
        """Return a line with how many cases were selected, and below it up to eight reasons with their counts, most
        frequent first.
        """
        counts: dict[str, int] = {}
        for reason in self.reasons.values():
            counts[reason] = counts.get(reason, 0) + 1
        commonest = sorted(counts.items(), key=lambda item: -item[1])
        reasons = "".join(f"\n  {count:>4} x  {reason}" for reason, count in commonest[:8])
        return f"{len(self.cases)} of {self.requested_count} cases can be affected by what changed since {self.base}{reasons}"


def select_affected(cases: Sequence[Case], base: str, trainer: str, name: str, folder: Path) -> AffectedCases:
    """Return the cases that can be affected by what changed since `base` in the repository of `trainer`.

    name: the trainer's, without its source. folder: of maps. A case without a map is selected. A map of another commit
    than `base` is as good: what changed between the two counts as well. Raises CaseError if `base` is no commit, or no
    case has a map.
    """
    root = repository_of(trainer)
    commit = run_git(root, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}").stdout.strip()
    if not commit:
        raise CaseError(f"--changed {base}: {root} has no such commit")
    maps = {case.name: _read_map(folder, case, name) for case in cases}
    if not any(maps.values()):
        raise CaseError(f"{folder}: no map of these cases of {name}; `harness matrix --map DIR` makes one")
    changes_by_commit = {
        case_map.commit: _changes_since_map(root, case_map.commit, commit) for case_map in maps.values() if case_map
    }
    case_folders = _folders_of_cases(cases, root)
    reasons = {}
    for case in cases:
        case_map = maps[case.name]
        reason = (
            reason_for(case, case_map, changes_by_commit[case_map.commit], case_folders)
            if case_map
            else "not known what it runs"
        )
        if reason:
            reasons[case.name] = reason
    return AffectedCases(tuple(case for case in cases if case.name in reasons), reasons, len(cases), base)


def _read_map(folder: Path, case: Case, name: str) -> CaseMap | None:
    """Return the map of a case in a folder of maps. None if there is no such file, or if it is of another trainer."""
    path = map_file(folder, case.name)
    case_map = CaseMap.load(path) if path.exists() else None
    return case_map if case_map and case_map.trainer == name else None


def _changes_since_map(root: Path, mapped: str, base: str) -> SourceChanges:
    """Return what changed from the map's commit to `base`, and from there to the files in the working tree."""
    changes = changes_between(root, base, None)
    if mapped != base:
        changes.add(changes_between(root, mapped, base))
    return changes


def _folders_of_cases(cases: Iterable[Case], root: Path) -> set[PurePath]:
    """Return the folders, relative to the root, whose YAML files define cases. Folders outside the repository are left out.

    A change of these files does not count by itself: the definitions of the cases are compared.
    """
    folders = {path_of(case.file).resolve().parent for case in cases if case.file}
    return {PurePath(folder.relative_to(root)) for folder in folders if folder.is_relative_to(root)}


def reason_for(case: Case, case_map: CaseMap, changes: SourceChanges, case_folders: set[PurePath]) -> str:
    """Return why the changes can affect the case, as the first reason that holds. Empty if they cannot.

    case_folders: folders of YAML files with cases.
    """
    if case_map.case != json.loads(json.dumps(requested.to_json(case))):
        return "the case itself changed"
    if case_map.lost and changes.python_files:
        return f"{case_map.lost}, which may run {min(changes.python_files)}"
    if data := sorted(file for file in changes.other_files if not _cannot_affect(file, case_map, case_folders)):
        return f"no Python: {data[0]}{_more_text(data)}"
    run_files = case_map.imported | case_map.shared
    folders: set[PurePath] = set()
    for file in run_files:
        folders.update(PurePath(file).parents)
    for file in sorted(changes.new_files):
        if PurePath(file.removesuffix("/__init__.py")).parent in folders:
            return f"new beside what is imported: {file}"
    for file in sorted(changes.gone_files & run_files):
        return f"gone: {file}"
    for file, why in sorted(changes.whole_files.items()):
        if file in run_files:
            return f"{why}: {file}"
    for file, names in sorted(changes.functions.items()):
        if file in case_map.shared:
            return f"the harness itself calls it: {file}"
        if ran := sorted(names & case_map.functions.get(file, frozenset())):
            return f"{ran[0]} of {file}{_more_text(ran)}"
    return ""


def _more_text(names: Sequence[str]) -> str:
    """Return " and N more" for all names but the first; empty for a single name."""
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _cannot_affect(file: str, case_map: CaseMap, case_folders: set[PurePath]) -> bool:
    """Return whether a file that is not Python has no effect: a shell script if no rank started a shell, or YAML with cases."""
    return (
        file.endswith(".sh") and not case_map.shell or file.endswith(".yaml") and PurePath(file).parent in case_folders
    )


def shared_files(imported: Iterable[str], parents: Iterable[str], root: Path) -> set[str]:
    """Return the files whose functions may have run in a process that records nothing, relative to the root.

    imported: files that ranks imported. parents: files that processes imported that are not recorded, all of which are
    returned. If the harness itself lies in the repository, imported files are added, except those of trainers, probe
    and adapters.
    """
    shared = set(parents)
    if ROOT.is_relative_to(root):
        recorded_folders = tuple(
            f"{(ROOT / 'harness' / folder).relative_to(root)}/"
            for folder in ("core/trainers", "core/probe", "adapters")
        )
        shared |= {file for file in imported if not file.startswith(recorded_folders)}
    return shared
