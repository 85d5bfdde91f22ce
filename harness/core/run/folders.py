"""Folders of the evidence of runs, named so that no two kinds of run take each other's place."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.case.case import Case
from harness.core.case.trainer_spec import TrainerSpec
from harness.core.evidence.own_folders import CASE_FOLDER, empty_own_folder
from harness.reference.config import TrainingConfig

if TYPE_CHECKING:
    from harness.core.run.options import Options


def folder_of(case: Case, options: Options) -> Path:
    """Return the folder of a case's evidence, OUT/CASE, with a "+" before each thing that is not the usual.

    These are trainer@source, fault, another seed or dtype (of a case of no file), device, sharing, backend and rerun.
    """
    parts = [case.name]
    parts += [trainer_label(options.trainer)] if options.trainer != "llama3" else []
    parts += [options.fault.rpartition(":")[2]] if options.fault else []
    parts += [f"seed_{case.training.seed}"] if not case.file and case.training.seed != TrainingConfig().seed else []
    parts += [case.training.dtype] if not case.file and case.training.dtype != TrainingConfig().dtype else []
    parts += [options.device] if options.device != "cpu" else []
    parts += [f"{options.ranks_per_gpu}_ranks_per_gpu"] if options.ranks_per_gpu > 1 else []
    parts += [options.backend] if options.backend else []
    parts += [f"again_{options.nth}"] if options.nth else []
    return options.out / "+".join(parts)


def trainer_label(spec: str) -> str:
    """Return NAME, or NAME@SOURCE with the last part of the source's path and six digits of all of it."""
    trainer = TrainerSpec.parse(spec)
    digest = hashlib.sha256(trainer.source.encode()).hexdigest()[:6]
    last = re.sub(r"[^\w.-]", "_", Path(trainer.source).name)[:40]
    return Path(trainer.name).stem + (f"@{last}-{digest}" if trainer.source else "")


def name_without_source(name: str) -> str:
    """Return a folder's name without the trainer's source, so that it is the same for any source."""
    return re.sub(r"@[^+]*", "", name)


def find_case_folders(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of cases among these: a folder itself, or all those in it if it is a folder of such folders.

    A folder that holds neither is returned as it is, so that reading it says what is wrong.
    """
    found_folders = []
    for folder in folders:
        case_folders_inside = sorted(path.parent for path in folder.glob("*/case.json"))
        found_folders += (
            case_folders_inside if case_folders_inside and not (folder / "case.json").exists() else [folder]
        )
    return found_folders


def make_fresh_folder(folder: Path) -> Path:
    """Make a case's folder, or delete what an earlier run left in it, and return it.

    Raises EvidenceError for one in which anything is not of this harness, and then deletes nothing. case.json is
    written first and deleted last. So a run that is killed in between leaves a folder that the next run takes.
    """
    return empty_own_folder(folder, CASE_FOLDER)
