"""Flows: bytes that one rank moves for one purpose.

They count the unsharded tensor, so that bucketing does not change them.
"""

from __future__ import annotations

from dataclasses import dataclass

OUTSIDE = "outside"
"""Of forward and backward: where small collectives of every kind are, so that a flow there is what is moved at least."""

PARAMETER_ROLES = ("parameters", "gradients")
"""Roles of what sharding and replication move, which follows from the layout alone."""

TIED_ROLE = "gradients of a tied weight"
"""Role of what first and last stage add up: each has the gradient of its own use of the weight."""


@dataclass(frozen=True)
class Flow:
    """Bytes that one rank must move over one axis in a step, for one purpose.

    Bytes count the unsharded tensor (all_gather's output, reduce_scatter's input, all_reduce's tensor), so they depend
    neither on bucketing nor on the algorithm behind the collective.
    """

    axis: str
    """Axis of the plan over whose group the bytes move, such as dp_shard_cp."""
    role: str
    """What moves, in words, such as parameters or gradients."""
    op: str
    """Collective, such as all_gather; or send, recv."""
    phase: str
    """Phase of the step: forward, backward, pipeline or outside."""
    bytes: int
    """Bytes in one step."""
    optional: bool = False
    """Whether it may also run outside of forward and backward, where other small collectives hide it."""
    first: bool = False
    """Whether it runs in the first step only."""
    later: bool = False
    """Whether it runs in all steps but the first."""
    last: bool = False
    """Whether it runs in the last step of the launch only."""
