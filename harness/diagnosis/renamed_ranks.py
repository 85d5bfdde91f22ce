"""The same evidence, where each rank goes by the number of another: as if the ranks stood in another order in the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from harness.evidence.records import RankEvidence, Run, Wrapper
from harness.judge.trial import Trial

Names = Mapping[int, int]


def renamed(trial: Trial, names: Names) -> Trial:
    """names: a permutation of the ranks."""
    repeat = _run(trial.repeat, names) if trial.repeat else None
    return replace(trial, run=_run(trial.run, names), repeat=repeat)


def _run(run: Run, names: Names) -> Run:
    ranks = {names[rank]: _evidence(evidence, names) for rank, evidence in run.ranks.items()}
    exits = tuple(sorted((replace(exit, rank=names[exit.rank]) for exit in run.exits), key=lambda exit: exit.rank))
    return replace(run, ranks=dict(sorted(ranks.items())), exits=exits)


def _evidence(evidence: RankEvidence, names: Names) -> RankEvidence:
    def line(ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(names[rank] for rank in ranks))

    def wrapper(of: Wrapper) -> Wrapper:
        return replace(of, shard_ranks=line(of.shard_ranks), replicate_ranks=line(of.replicate_ranks))

    calls = (replace(c, ranks=line(c.ranks), peer=names.get(c.peer, c.peer)) for c in evidence.collectives)  # type: ignore[arg-type]
    return replace(
        evidence,
        rank=names[evidence.rank],
        groups=tuple(replace(group, ranks=line(group.ranks)) for group in evidence.groups),
        collectives=tuple(calls),
        parameters=tuple(replace(tensor, mesh=_mesh(tensor.mesh, names)) for tensor in evidence.parameters),
        structure={module: wrapper(of) for module, of in evidence.structure.items()},
    )


def _mesh(mesh: Any, names: Names) -> Any:
    return None if mesh is None else np.vectorize(names.get)(np.array(mesh)).tolist()
