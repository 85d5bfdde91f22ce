"""The map of a case: the functions of the trainer's repository that it ran, written after the case was judged."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.core import trainers
from harness.core.case import case as requested
from harness.core.case.case import Case
from harness.core.case.trainer_repository import clean_commit, repository_of
from harness.core.evidence.git import run_git
from harness.core.evidence.own_folders import refuse_foreign_file
from harness.core.evidence.reading import read_json
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Verdict
from harness.core.launch.python_path import module_command
from harness.core.run.options import Options
from harness.nights.affected.maps import CaseMap, is_map, map_file, merge_rank_records
from harness.nights.affected.recorder import imported_modules
from harness.nights.affected.selecting import shared_files


def keep_map(case: Case, options: Options, folder: Path, judgement: Judgement) -> None:
    """Write the map of a case to options.map/CASE.json. Without options.map nothing happens.

    If a rank did not come to its end, an older map is deleted: a case without a map is always selected. Raises
    CaseError without a clean repository, and EvidenceError if another file is there.
    """
    if options.map is None:
        return
    path = map_file(options.map, case.name)
    if any(result.check == "completed" and result.verdict is not Verdict.PASS for result in judgement.results):
        refuse_foreign_file(path, is_map)
        path.unlink(missing_ok=True)
        return
    root = repository_of(options.trainer)
    tracked = set(run_git(root, "ls-files", "-z").stdout.split("\0"))
    rank_records = [read_json(file) for file in sorted(folder.glob("*/ranks/*.functions.json"))]
    earlier_modules: set[tuple[str, str]] = set()
    for rank_record in rank_records:
        earlier_modules.update(rank_record["earlier"].items())
    before_ranks = record_imports(root, tuple(sorted(earlier_modules)))
    all_records = merge_rank_records([*rank_records, before_ranks])
    functions = {file: frozenset(names) for file, names in all_records["functions"].items() if file in tracked}
    files = all_records["imported"] & tracked
    run_elsewhere = {*dict(imported_modules(os.path.realpath(root))).values(), *before_ranks["earlier"].values()}
    CaseMap(
        case=requested.to_json(case),
        trainer=trainers.load_adapter(options.trainer).name,
        commit=clean_commit(root),
        functions=functions,
        imported=frozenset(files),
        shared=frozenset(shared_files(files, tracked & run_elsewhere, root)),
        lost=all_records["lost"],
        shell=all_records["shell"],
    ).save(path)


@functools.cache
def record_imports(root: Path, modules: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Return the record of FunctionRecorder.stop for importing modules, in a separate process. It is cached.

    The rank server imported them before its ranks started. modules: (name, file) each. If the process fails, the record
    has no functions, and "earlier" has all modules: any of their functions may have run.
    """
    mains = {name: file for name, file in modules if name in ("__main__", "__mp_main__")}
    if names := [name for name, _ in modules if name not in mains]:
        command = module_command("harness.nights.affected.recorder", str(root), *names)
        path = os.pathsep.join(filter(None, sys.path))
        process = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        if not process.returncode:
            record: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
            return record | {"earlier": record["earlier"] | mains}
    return {"functions": {}, "imported": [], "earlier": dict(modules), "lost": "", "shell": False}
