"""Traits of the trainer that only the evidence of all ranks together shows: they are written once, before anything is
judged."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

from harness.core.case import traits
from harness.core.case.case import Case
from harness.core.case.traits import TrainerTraits
from harness.core.evidence.records import Run
from harness.core.evidence.store import TRAITS_FILE, evidence_file, load_run, save_stored, write_text
from harness.core.judge.clipping import gradient_factor, steps_right_after_scaling, with_gradients_after
from harness.core.judge.measured import with_measured_traits
from harness.core.judge.stored_trial import load_trial


def write_measured_traits(case: Case, folder: Path, declared: Mapping[str, TrainerTraits]) -> None:
    """Write traits.json: by launch, what the trainer declares and what was measured of it.

    The ranks' files are rewritten where clipping was given other gradients than those at the end of backward.
    """
    runs = {name: load_run(folder / name, values=False) for name in case.launches}
    traits_by_launch = {}
    for name, launched in case.launches.items():
        traits_by_launch[name] = traits.to_json(with_measured_traits(launched, declared[name], runs[name]))
    write_text(folder / TRAITS_FILE, json.dumps(traits_by_launch, indent=1))
    if any(map(_is_altered_after_backward, runs.values())):
        _settle_gradients(folder)


def _is_altered_after_backward(run: Run) -> bool:
    """Return whether any gradients were multiplied between backward and the optimizer, by something other than torch."""
    steps = itertools.chain.from_iterable(evidence.steps for evidence in run.ranks.values())
    return any(gradient_factor(step) not in (None, 1.0) for step in steps)


def _settle_gradients(folder: Path) -> None:
    """Rewrite the files of ranks with the gradients that clipping was given, for steps in which they are not those of
    backward."""
    trial = load_trial(folder)
    for launch in trial.launches:
        clipped_late = steps_right_after_scaling(launch)
        runs = [launch.run, launch.repeat]
        for run in filter(None, runs if clipped_late else []):
            stored = load_run(Path(run.directory))
            for rank, evidence in with_gradients_after(stored, clipped_late).ranks.items():
                save_stored(evidence_file(Path(run.directory), rank), evidence)
