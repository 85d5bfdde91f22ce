"""The public names for adapters, notes to the probe and faults, in one place, which stays: CHANGELOG.md says what
changes in it.

    from harness.adapter import Adapter, Case, Metrics, StartedTrainer, beyond, pairs, renamed

A name is imported when it is asked for, so that a trainer that calls `note_loss` imports little else.
"""

from __future__ import annotations

import importlib
from typing import Any

CORE, SUPPORT, OWN = "harness.core", "harness.core.trainers.support", "harness.adapters.support"
PLACES = {
    # an adapter
    "Adapter": f"{CORE}.trainers",
    "Allowance": f"{CORE}.case.allowance",
    "Case": f"{CORE}.case.case",
    "Metrics": f"{CORE}.trainers",
    "Number": f"{CORE}.evidence.numbers",
    "StartedTrainer": f"{CORE}.trainers",
    "TrainerTraits": f"{CORE}.case.traits",
    "ScriptAdapter": f"{OWN}.script_adapter",
    "beyond": f"{OWN}.requests",
    "halves": f"{OWN}.rows",
    "in_one": f"{SUPPORT}.names",
    "pairs": f"{SUPPORT}.names",
    "renamed": f"{SUPPORT}.names",
    # what it brings to a trainer
    "RecipeSamples": f"{SUPPORT}.samples",
    "RecipeStream": f"{SUPPORT}.samples",
    "rank_samples": f"{SUPPORT}.samples",
    "recipe_batches": f"{SUPPORT}.samples",
    # notes to the probe
    "note_action": f"{CORE}.probe.pipeline",
    "note_gradients": f"{CORE}.probe.values",
    "note_loss": f"{CORE}.probe.losses",
    "note_placement": f"{CORE}.probe.structure",
    "note_shards": f"{CORE}.probe.shards",
    "note_update": f"{CORE}.probe.values",
    "note_wrapper": f"{CORE}.probe.structure",
    "pass_of_schedule": f"{CORE}.probe.pipeline",
    "reducing_gradients": f"{CORE}.probe.values",
    # faults
    "Fault": "harness.faults",
    "fault": "harness.faults",
}
"""Name -> the module that has it."""
MODULES = {
    "checkout": f"{OWN}.checkout",
    "checkpoints": f"{SUPPORT}.checkpoints",
    "chunks": f"{CORE}.probe.chunks",
    "cpu_attention": f"{SUPPORT}.cpu_attention",
    "float64": f"{OWN}.float64",
    "learning_rate": f"{OWN}.learning_rate",
    "operators": "harness.faults.operators",
    "process_group": f"{SUPPORT}.process_group",
    "samples": f"{SUPPORT}.samples",
    "script": f"{OWN}.script",
    "training_function": f"{OWN}.training_function",
    "weights": f"{SUPPORT}.weights",
}
"""Name -> the module that it is."""


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return importlib.import_module(MODULES[name])
    if name in PLACES:
        return getattr(importlib.import_module(PLACES[name]), name)
    raise AttributeError(f"harness.adapter has no {name!r}; it has {', '.join(sorted({*PLACES, *MODULES}))}")


def __dir__() -> list[str]:
    return sorted({*PLACES, *MODULES})
