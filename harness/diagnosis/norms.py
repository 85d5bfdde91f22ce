"""Norms of gradients that are not the global one: what a rank may clip by, or report, in its place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import numpy as np

from harness.checks.update import observed_norm
from harness.diagnosis.algorithms import kinds_of_parameters
from harness.judge.trial import Trial
from harness.plan.grid import groups
from harness.plan.stages import parameters_of_stage

Norm = Callable[[int, int], float]
"""By rank and step."""
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


def other_norms(trial: Trial) -> Iterator[tuple[str, Norm]]:
    """In words, and by rank and step."""
    shared = [*axes_left_out(trial, AXES[1:])]
    if len(trial.ranks) > 1 and not shared:
        yield "the norm of its own gradients", partial(norm_over, trial, ())
    for missing, along in shared:
        summed = f"not summed over {' and '.join(missing)}"
        alone = set(along) <= {"dp_replicate"}
        yield (
            f"the norm of its own shards ({summed})" if alone else f"a norm {summed}",
            partial(norm_over, trial, along),
        )
    for axis in (axis for axis in trial.plan.groups if _has_replicas(trial, axis)):
        yield f"a norm that counts every replica along {axis}", partial(_counting_again, trial, axis)
    yield "the largest absolute entry (infinity norm)", partial(_of_entries, trial, max)
    yield "the sum of all absolute entries (norm type 1)", partial(_of_entries, trial, math.fsum)
    if trial.case.dims.pp > 1:
        yield "the sum of the norms of all stages", partial(_sum_of_stages, trial)
    together = "the sum of the norms of all parameters"
    yield together, lambda rank, step: math.fsum(map(math.sqrt, squares(trial, step).values()))
    for name, kind in kinds_of_parameters(trial).items():
        yield f"the norm of {name} only", partial(_of_parameters, trial, kind)
        yield f"a norm without {name}", partial(_of_parameters, trial, set(trial.plan.shapes) - kind)
    yield "the square of the global norm", lambda rank, step: observed_norm(trial, step) ** 2


def _sum_of_stages(trial: Trial, rank: int, step: int) -> float:
    stages = (parameters_of_stage(trial.case, stage) for stage in range(trial.case.n_stages))
    return math.fsum(norm_of(trial, fqns, step) for fqns in stages)


def axes_left_out(trial: Trial, axes: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(those left out, all other axes), few first."""
    present = [axis for axis in axes if getattr(trial.case.dims, axis) > 1]
    others = [axis for axis in AXES if getattr(trial.case.dims, axis) > 1]
    for count in range(1, len(present) + 1):
        for missing in itertools.combinations(present, count):
            yield missing, tuple(axis for axis in others if axis not in missing)


def peers(trial: Trial, rank: int, along: tuple[str, ...]) -> tuple[int, ...]:
    return next(group for group in groups(trial.case.dims, *along) if rank in group) if along else (rank,)


def norm_over(trial: Trial, along: tuple[str, ...], rank: int, step: int) -> float:
    return observed_norm(trial, step, peers(trial, rank, along))


def norm_of(trial: Trial, fqns: Iterable[str], step: int) -> float:
    """The global norm of some parameters."""
    of_each = squares(trial, step)
    return math.sqrt(math.fsum(of_each[fqn] for fqn in fqns if fqn in of_each))


def _of_parameters(trial: Trial, fqns: Iterable[str], rank: int, step: int) -> float:
    """The same on every rank."""
    return norm_of(trial, fqns, step)


def squares(trial: Trial, step: int) -> Mapping[str, float]:
    """By parameter, the sum of the squares of its gradient, each entry counted once: as the first that holds it has it."""
    found: dict[str, list[float]] = {}
    for (fqn, _), (gradient, _) in _pieces(trial, step).items():
        found.setdefault(fqn, []).append(float(np.sum(np.square(gradient, dtype=np.float64))))
    return {fqn: math.fsum(of_one) for fqn, of_one in found.items()}


def _pieces(trial: Trial, step: int) -> dict[tuple[str, object], tuple[np.ndarray, int]]:
    """By parameter and slice, the gradient, and the first rank that holds it."""
    found: dict[tuple[str, object], tuple[np.ndarray, int]] = {}
    for rank, evidence in sorted(trial.ranks.items()):
        for record in (record for record in evidence.steps if record.step == step):
            for fqn, gradient in record.gradients.items():
                found.setdefault((fqn, trial.gradient_slice_of(rank, fqn)), (gradient, rank))
    return found


def _of_entries(trial: Trial, total: Callable[[Iterable[float]], float], rank: int, step: int) -> float:
    sizes = (np.abs(gradient.astype(np.float64)) for gradient, _ in _pieces(trial, step).values())
    return total(total(size.ravel().tolist()) for size in sizes if size.size)


def _has_replicas(trial: Trial, axis: str) -> bool:
    """Whether anything counts twice along it: ZeRO leaves none of a gradient."""
    holders = {(fqn, part): holder for (fqn, part), (_, holder) in _pieces(trial, trial.first_step).items()}
    return any(_alike(trial, axis, *piece, holder) for piece, holder in holders.items())


def _alike(trial: Trial, axis: str, fqn: str, part: object, holder: int) -> bool:
    return all(trial.gradient_slice_of(peer, fqn) == part for peer in trial.plan.group_of(holder, axis))


def _counting_again(trial: Trial, axis: str, rank: int, step: int) -> float:
    """Parameters that are alike along an axis count once for every rank of it."""
    total = []
    for (fqn, part), (gradient, holder) in _pieces(trial, step).items():
        times = len(trial.plan.group_of(holder, axis)) if _alike(trial, axis, fqn, part, holder) else 1
        total.append(float(np.sum(np.square(gradient, dtype=np.float64))) * times)
    return math.sqrt(math.fsum(total))
