"""The cases that run what changed, and of each the reason."""

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
from harness.core.evidence.git import git
from harness.nights.affected.maps import CaseMap, file_of
from harness.nights.affected.sources import Changes, between


@dataclass(frozen=True)
class Affected:
    """The cases that can be affected, of those that were requested, and the reason of each."""

    cases: tuple[Case, ...]
    why: dict[str, str]  # by name
    asked: int  # how many cases were looked at
    base: str

    def sentence(self) -> str:
        """Return what was selected, and the commonest reasons."""
        counts: dict[str, int] = {}
        for reason in self.why.values():
            counts[reason] = counts.get(reason, 0) + 1
        most = sorted(counts.items(), key=lambda item: -item[1])
        reasons = "".join(f"\n  {count:>4} x  {reason}" for reason, count in most[:8])
        return f"{len(self.cases)} of {self.asked} cases can be affected by what changed since {self.base}{reasons}"


def affected(cases: Sequence[Case], base: str, trainer: str, name: str, folder: Path) -> Affected:
    """Return the cases that run what changed since `base` in the repository of `trainer`. Raises CaseError.

    name: the trainer's, without its source. folder: of maps. A map of another commit than `base` is as good: what
    changed between the two counts as well.
    """
    root = repository_of(trainer)
    commit = git(root, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}").stdout.strip()
    if not commit:
        raise CaseError(f"--changed {base}: {root} has no such commit")
    maps = {case.name: _read(folder, case, name) for case in cases}
    if not any(maps.values()):
        raise CaseError(f"{folder}: no map of these cases of {name}; `harness matrix --map DIR` makes one")
    since = {one.commit: _since(root, one.commit, commit) for one in maps.values() if one}
    own = _folders_of_cases(cases, root)
    why = {}
    for case in cases:
        one = maps[case.name]
        reason = reason_for(case, one, since[one.commit], own) if one else "not known what it runs"
        if reason:
            why[case.name] = reason
    return Affected(tuple(case for case in cases if case.name in why), why, len(cases), base)


def _read(folder: Path, case: Case, name: str) -> CaseMap | None:
    path = file_of(folder, case.name)
    found = CaseMap.of(path) if path.exists() else None
    return found if found and found.trainer == name else None


def _since(root: Path, mapped: str, base: str) -> Changes:
    """Return what changed from the map's commit to `base`, and from there to the files that are there now."""
    changes = between(root, base, None)
    if mapped != base:
        changes.add(between(root, mapped, base))
    return changes


def _folders_of_cases(cases: Iterable[Case], root: Path) -> set[PurePath]:
    """Return the folders whose YAML files define cases, of which the definitions themselves are compared."""
    folders = {path_of(case.file).resolve().parent for case in cases if case.file}
    return {PurePath(folder.relative_to(root)) for folder in folders if folder.is_relative_to(root)}


def reason_for(case: Case, one: CaseMap, changes: Changes, own: set[PurePath]) -> str:
    """Return why the case can be affected; empty if it cannot."""
    if one.case != json.loads(json.dumps(requested.to_json(case))):
        return "the case itself changed"
    if one.lost and changes.python:
        return f"{one.lost}, which may run {min(changes.python)}"
    if data := sorted(file for file in changes.data if not _is_known(file, one, own)):
        return f"no Python: {data[0]}" + f" and {len(data) - 1} more" * (len(data) > 1)
    seen = one.imported | one.shared
    places = {parent for file in seen for parent in PurePath(file).parents}
    for file in sorted(changes.new):
        if PurePath(file.removesuffix("/__init__.py")).parent in places:
            return f"new beside what is imported: {file}"
    for file in sorted(changes.gone & seen):
        return f"gone: {file}"
    for file, why in sorted(changes.whole.items()):
        if file in seen:
            return f"{why}: {file}"
    for file, names in sorted(changes.functions.items()):
        if file in one.shared:
            return f"the harness itself calls it: {file}"
        if ran := sorted(names & one.functions.get(file, frozenset())):
            return f"{ran[0]} of {file}" + f" and {len(ran) - 1} more" * (len(ran) > 1)
    return ""


def _is_known(file: str, one: CaseMap, own: set[PurePath]) -> bool:
    """Return whether a file that is no Python is a script that no rank started, or has the definitions of cases."""
    return file.endswith(".sh") and not one.shell or file.endswith(".yaml") and PurePath(file).parent in own


def shared_files(imported: Iterable[str], parents: Iterable[str], root: Path) -> set[str]:
    """Return the files whose functions may have run where nothing is recorded.

    They are what the harness's own process imported. Where the harness is the repository, they are all but trainers and probe.

    imported: by ranks; parents: by processes that are not recorded; both relative to the root.
    """
    found = set(parents)
    if ROOT.is_relative_to(root):
        watched = tuple(
            f"{(ROOT / 'harness' / room).relative_to(root)}/" for room in ("core/trainers", "core/probe", "adapters")
        )
        found |= {file for file in imported if not file.startswith(watched)}
    return found
