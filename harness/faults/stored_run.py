"""A run whose evidence lies there already: of the same case, sources and packages, it is judged again, not made again."""

from __future__ import annotations

import json

from harness.core import trainers
from harness.core.case import traits
from harness.core.case.case import Case, to_json
from harness.core.evidence.reading import read_json
from harness.core.evidence.store import CASE_FILE, EvidenceError
from harness.core.judge.judgement import Judgement
from harness.core.run.communication import backend
from harness.core.run.folders import folder_of
from harness.core.run.judging import judge_folder
from harness.core.run.locks import only_one
from harness.core.run.options import Options
from harness.core.run.sources import digest


def judged_again(case: Case, options: Options) -> Judgement | None:
    """What the stored evidence says now. None if there is none, or if it is of another case, source, package or machine."""
    folder = folder_of(case, options)
    sources = digest(options)
    if case.training.data is not None or not sources or not (folder / CASE_FILE).exists():
        return None
    with only_one(options.out / ".locks" / f"{folder.name}.lock"):
        try:
            stored = read_json(folder / CASE_FILE)
            settled = traits.settled(case, trainers.traits_by_launch(case, options.trainer))
            if stored != json.loads(json.dumps(to_json(settled))):
                return None
            judgement = judge_folder(folder)
        except (EvidenceError, OSError, ValueError):  # of a run that was cut short
            return None
    same = {"sources": sources, "device": options.device, "launcher": options.launcher}
    same |= {"backend": backend(options)} if options.device == "cuda" else {}
    return judgement if same.items() <= judgement.made.items() and judgement.fault == options.fault else None
