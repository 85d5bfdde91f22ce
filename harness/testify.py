"""What one process does under launch: run the trainer under the probe and leave evidence, or run the reference.

Both are entries for harness.launch and take plain options, so that local and torchrun ranks do exactly the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from harness import trainers
from harness.case import from_json
from harness.evidence import Collective, rank_file, save
from harness.faults import load_fault
from harness.launch import inflight


def rank(options: dict[str, Any]) -> None:
    """options: case, trainer, weights, device, fault ("FILE.py:NAME" or None), directory (of the evidence), checkpoints.

    What a launch writes there the next one continues from; a checkpoint is written and read while the probe watches.
    """
    from harness.probe import Probe

    case, adapter = from_json(options["case"]), trainers.load(options["trainer"])
    checkpoints = Path(options["checkpoints"])
    this, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    fired = _apply_fault(options.get("fault"))
    probe = Probe(this, world_size, on_issue=_note_inflight())
    probe.install()
    try:
        trainer = adapter.start(case, Path(options["weights"]), options["device"])
        probe.attach(trainer.model_parts)
        if case.resume:
            trainer.resume(checkpoints)
            probe.resumed(case.steps.start - 1)
        trainer.train(case.steps[-1])
        probe.trained()
        if case.last_step is not None:
            trainer.save(checkpoints)
        displayed = {metrics.step: (metrics.loss, metrics.grad_norm) for metrics in trainer.metrics}
        evidence = probe.evidence(displayed, fault=bool(fired) if options.get("fault") else None)
    finally:
        probe.remove()
    save(rank_file(Path(options["directory"]), this), evidence)
    adapter.stop()


def reference(options: dict[str, Any]) -> None:
    """options: case, directory, device, noise (keys to measure); leaves reference.npz and weights.npz in the directory."""
    from reference.train import train

    case, directory = from_json(options["case"]), Path(options["directory"])
    told = train(case.model, case.training, options["device"], noise=options["noise"])
    partial = directory / ".weights.partial.npz"
    np.savez(partial, **told.weights)  # type: ignore[arg-type]
    os.replace(partial, directory / "weights.npz")
    save(directory / "reference.npz", told)


def _apply_fault(spec: str | None) -> list[bool]:
    fired: list[bool] = []
    if spec:
        load_fault(spec).apply(lambda: fired.append(True))
    return fired


def _note_inflight() -> Callable[[Collective], None]:
    """Every collective is put on record before it is issued, so that a hang can be explained from outside."""
    record = inflight.current()

    def note(call: Collective) -> None:
        if record is not None:
            record.issue(call.group, call.ranks, call.seq, call.op, call.bytes, call.step, call.phase, call.peer)

    return note
