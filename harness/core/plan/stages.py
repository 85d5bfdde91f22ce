"""The content of pipeline stages: their layers and parameters; the tokens of a cp rank, and the layers that are
recomputed."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np

from harness.core.case import schedule
from harness.core.case.case import Case
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.slices import parameter_shapes


def stages_of_rank(case: Case, rank: int) -> tuple[int, ...]:
    """Return the stages of the pipeline that a rank holds, ascending; (0,) without a pipeline."""
    return schedule.stages_at_pp_index(
        case.features.schedule, case.dims.pp, case.stages_per_rank, coordinate_of_rank(case.dims, rank)["pp"]
    )


def actions_of_rank(case: Case, rank: int) -> tuple[schedule.Action, ...]:
    """Return the actions of a rank in one pass of the schedule, in order; () without a pipeline."""
    if case.dims.pp == 1:
        return ()
    numbers = (case.features.schedule, case.dims.pp, case.stages_per_rank, case.microbatches)
    return schedule.schedule_actions(*numbers, coordinate_of_rank(case.dims, rank)["pp"])


def layers_of_stage(case: Case, stage: int) -> range:
    """Return the layers of a stage: consecutive ones, as equally many as can be. The first stages take what is left over.

    What the first and the last stage have less counts as layers before the first one, and behind the last. So an end
    may have no layer.
    """
    layers = case.model.n_layers
    if case.n_stages == 1:
        return range(layers)
    first_less = case.features.first_stage_less_layers
    last_less = case.features.last_stage_less_layers
    least, remainder = divmod(first_less + layers + last_less, case.n_stages)
    start = stage * least + min(stage, remainder) - first_less
    return range(max(start, 0), min(start + least + (stage < remainder), layers))


def parameters_of_stage(case: Case, stage: int) -> list[str]:
    """Return the fqns of a stage's parameters, in the model's order.

    The embedding is with the first stage's layers, the final norm and the output with the last one's. A tied embedding is the
    output as well: of it both stages have a copy.
    """
    if case.n_stages == 1:
        return list(parameter_shapes(case.model))
    prefixes = [f"layers.{layer}." for layer in layers_of_stage(case, stage)]
    if stage == 0:
        prefixes.append("tok_embeddings.")
    if stage == case.n_stages - 1:
        prefixes += ["norm.", "tok_embeddings." if case.model.tied_embeddings else "output."]
    stage_prefixes = tuple(prefixes)
    return [fqn for fqn in parameter_shapes(case.model) if fqn.startswith(stage_prefixes)]


def token_positions_of_rank(case: Case, rank: int, length: int) -> np.ndarray:
    """Return the token positions of a sample that a rank receives, in its order. int64 [length / cp]."""
    index = coordinate_of_rank(case.dims, rank)["cp"]
    return token_positions_of_part(length, case.dims.cp, index, balanced=case.features.cp_load_balance)


@functools.lru_cache(maxsize=1 << 10)
def token_positions_of_part(length: int, cp: int, index: int, *, balanced: bool) -> np.ndarray:
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


def parameters_of_rank(case: Case, rank: int) -> list[str]:
    """Return the fqns of the parameters of a rank's stages, stage by stage. One that two of them share is there twice."""
    fqns = []
    for stage in stages_of_rank(case, rank):
        fqns += parameters_of_stage(case, stage)
    return fqns


def layers_of_stages(case: Case, stages: Iterable[int]) -> list[int]:
    """Return the layers of these stages, stage by stage."""
    layers: list[int] = []
    for stage in stages:
        layers += layers_of_stage(case, stage)
    return layers


def recomputed_layers(case: Case, rank: int) -> list[int]:
    """Return the rank's layers whose activations are computed again in backward; none without activation checkpointing.

    "full" and "op" recompute all layers, "layer" the second, fourth, .. layer of the model.
    """
    kind = case.features.activation_checkpointing
    layers = layers_of_stages(case, stages_of_rank(case, rank))
    return [layer for layer in layers if kind in ("full", "op") or (kind == "layer" and layer % 2 == 1)]
