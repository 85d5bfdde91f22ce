"""The bytes that a rank sends in a step, by axis, and over which links: between GPUs of one node, or from node to node.

Ranks are taken to fill nodes in their order. In a ring of n ranks each sends (n - 1) / n of what all_gather and
reduce_scatter count, and twice that for all_reduce.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from harness.core.plan.plan import Plan
from harness.core.plan.traffic.flow import Flow

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class AxisTraffic:
    """Traffic of one rank over one axis in one step."""

    axis: str
    """Axis of the plan."""
    ranks: int
    """Number of ranks in the rank's group along it."""
    nodes: int
    """Number of nodes on which that group lies."""
    counted: int
    """Bytes of whole tensors, as checks count them."""
    sent: int
    """Bytes that the rank sends, over a ring."""

    @property
    def links(self) -> str:
        """Return over which links the axis sends: "within a node", or "across 2 nodes, 4 ranks in each"."""
        if self.nodes == 1:
            return "within a node"
        each = self.ranks / self.nodes
        return f"across {self.nodes} nodes" + (f", {each:g} ranks in each" if each > 1 else "")


def traffic_by_axis(plan: Plan, rank: int, *, gpus_per_node: int = GPUS_PER_NODE) -> tuple[AxisTraffic, ...]:
    """Return a rank's traffic over each axis, the one with most bytes sent first, in a step with step 1's sequence length.

    Flows of the first step alone are left out; those of later or last steps alone count.
    """
    flows_by_axis: dict[str, list[Flow]] = defaultdict(list)
    for flow in plan.flows[rank]:
        if not flow.first:
            flows_by_axis[flow.axis].append(flow)
    traffic = []
    for axis, flows in flows_by_axis.items():
        peers = plan.peers(rank, axis)
        nodes = len({peer // gpus_per_node for peer in peers})
        counted = sum(flow.bytes for flow in flows)
        sent = sum(sent_bytes(flow, len(peers)) for flow in flows)
        traffic.append(AxisTraffic(axis, len(peers), nodes, counted, sent))
    return tuple(sorted(traffic, key=lambda axis_traffic: -axis_traffic.sent))


def sent_bytes(flow: Flow, ranks: int) -> int:
    """Return the bytes that a rank sends of a flow, over a ring of its group. ranks: the group's size.

    A flow that is only received counts at the rank that sends it, and one that is passed on counts as it is sent.
    """
    share = (ranks - 1) * flow.bytes // ranks
    if flow.op in ("all_gather", "reduce_scatter"):
        return share
    return {"all_reduce": 2 * share, "recv": 0}.get(flow.op, flow.bytes)
