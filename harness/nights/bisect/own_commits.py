"""A judge of commits of this project, or of a fork of it: trainer and checks are of one repository.

The commit runs the case in a separate process and leaves a verdict, which is taken as it stands. What it cannot do (a
case that it does not know the words of, a record it cannot write) is a reason to skip it.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from harness.core.case import case_files
from harness.core.case.case import Case
from harness.core.evidence.reading import read_json
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Result, Verdict, diagnosis_of_one_cause
from harness.core.launch.python_path import module_command
from harness.core.run.folders import folder_of, make_fresh_folder
from harness.core.run.options import Options, Unsupported

OWN_TRAINER = "llama3"
SPARSE_FILES = ("/harness/",)


def judge_checkout(case: Case, checkout: Path, options: Options) -> Judgement:
    """Run the case with the harness of the checkout, in a process of its own, and return the verdict that it wrote.

    Raises Unsupported with the last line of its stderr if it wrote none.
    """
    began = time.monotonic()
    folder = folder_of(case, options)
    make_fresh_folder(folder).rmdir()
    command = module_command("harness", "run", case.name, *_typed_options(case, options))
    environment = os.environ | {"PYTHONPATH": str(checkout), "HARNESS_SERVER": "own"}
    process = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    verdict = folder / "verdict.json"
    if not verdict.exists():
        error_lines = process.stderr.strip().splitlines()
        raise Unsupported(
            error_lines[-1].removeprefix("harness: ") if error_lines else f"exit code {process.returncode}"
        )
    return _parse_judgement(case, folder, read_json(verdict), time.monotonic() - began)


def _typed_options(case: Case, options: Options) -> list[str]:
    """Return the command-line words of `harness run` that repeat these options and the case's folder."""
    values = {"launcher": options.launcher, "device": options.device, "timeout": str(options.timeout)}
    values |= {"cases": str(case_files.path_of(case.file).parent), "out": str(options.out.resolve())}
    if options.fault:
        values["fault"] = options.fault
    words: list[str] = []
    for key, value in values.items():
        words += [f"--{key}", value]
    return words


def _parse_judgement(case: Case, folder: Path, verdict: dict[str, Any], seconds: float) -> Judgement:
    """Return the judgement of a commit's verdict.json, with check results and cause only. verdict: the parsed JSON.

    Raises Unsupported if a key of today's format is missing.
    """
    try:
        results = tuple(
            Result(row["check"], Verdict(row["verdict"]), row["examined"], note=row.get("note", ""))
            for row in verdict["results"]
        )
    except (KeyError, ValueError) as error:
        raise Unsupported(f"its verdict is not written as today's are ({error!r})") from error
    cause = diagnosis_of_one_cause(str(verdict["cause"])) if verdict.get("cause") else None
    return Judgement(case, folder, results, cause, seconds)
