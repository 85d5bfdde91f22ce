"""Which layers and parameters a rank's pipeline stages hold, which tokens a cp rank receives, what is recomputed."""

from __future__ import annotations

import functools

import numpy as np

from harness.core.case import schedule
from harness.core.case.case import Case
from harness.core.plan.grid import coordinate
from harness.core.plan.slices import parameter_shapes


def stages_of_rank(case: Case, rank: int) -> tuple[int, ...]:
    """The stages of the pipeline that a rank holds, ascending; (0,) without a pipeline."""
    return schedule.stages_of(
        case.features.schedule, case.dims.pp, case.stages_per_rank, coordinate(case.dims, rank)["pp"]
    )


def actions_of_rank(case: Case, rank: int) -> tuple[schedule.Action, ...]:
    """What a rank does in one pass of the schedule, in order; nothing without a pipeline."""
    if case.dims.pp == 1:
        return ()
    numbers = case.features.schedule, case.dims.pp, case.stages_per_rank, case.microbatches
    return schedule.actions(*numbers, coordinate(case.dims, rank)["pp"])


def layers_of_stage(case: Case, stage: int) -> range:
    """Consecutive layers, as equally many as can be; the first stages take what is left over. What the first and the last
    have less counts as layers before the first one, and behind the last."""
    layers, features = case.model.n_layers, case.features
    if case.n_stages == 1:
        return range(layers)
    first, last = features.first_stage_less_layers, features.last_stage_less_layers
    least, more = divmod(first + layers + last, case.n_stages)
    start = stage * least + min(stage, more) - first
    return range(max(start, 0), min(start + least + (stage < more), layers))


def parameters_of_stage(case: Case, stage: int) -> list[str]:
    """The embedding is with the first stage's layers, the final norm and the output with the last one's. A tied embedding is
    the output as well: of it both stages have a copy."""
    if case.n_stages == 1:
        return list(parameter_shapes(case.model))
    prefixes = [f"layers.{layer}." for layer in layers_of_stage(case, stage)]
    prefixes += ["tok_embeddings."] if stage == 0 else []
    prefixes += ["norm.", "tok_embeddings." if case.model.tied_embeddings else "output."] * (stage == case.n_stages - 1)
    return [fqn for fqn in parameter_shapes(case.model) if fqn.startswith(tuple(prefixes))]


def positions(case: Case, rank: int, length: int) -> np.ndarray:
    """Return the token positions of a sample that a rank receives, in its order. int64 [length / cp]."""
    index = coordinate(case.dims, rank)["cp"]
    return positions_of_part(length, case.dims.cp, index, balanced=case.features.cp_load_balance)


@functools.lru_cache(maxsize=1 << 10)
def positions_of_part(length: int, cp: int, index: int, *, balanced: bool) -> np.ndarray:
    """Return the positions that the rank at this index of cp receives, in its order. int64 [length / cp], not to be written.

    Load balancing gives each cp rank the i-th chunk from the front and the i-th from the back. Under a causal mask late
    tokens are more work.
    """
    if cp > 1 and balanced:
        chunks = np.split(np.arange(length), 2 * cp)
        part = np.concatenate([chunks[index], chunks[2 * cp - 1 - index]])
    else:
        part = np.split(np.arange(length), cp)[index].copy()  # which keeps no others
    part.setflags(write=False)
    return part


def recomputed_layers(case: Case, rank: int) -> list[int]:
    """The rank's layers whose activations are computed again in backward; "layer": the second, fourth, .. of the model."""
    kind = case.features.activation_checkpointing
    layers = [layer for stage in stages_of_rank(case, rank) for layer in layers_of_stage(case, stage)]
    return [layer for layer in layers if kind in ("full", "op") or (kind == "layer" and layer % 2 == 1)]
