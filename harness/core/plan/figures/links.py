"""What a rank sends in a step, by axis, and over which links: between GPUs of one node, or from node to node.

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
    """One rank, one step. counted: bytes of whole tensors, as checks count them; sent: over a ring. nodes: on how many of them
    the rank's group lies."""

    axis: str
    ranks: int
    nodes: int
    counted: int
    sent: int

    @property
    def links(self) -> str:
        if self.nodes == 1:
            return "within a node"
        each = self.ranks / self.nodes
        return f"across {self.nodes} nodes" + (f", {each:g} ranks in each" if each > 1 else "")


def traffic_by_axis(plan: Plan, rank: int, *, gpus_per_node: int = GPUS_PER_NODE) -> tuple[AxisTraffic, ...]:
    """Return the traffic of a step after the first with step 1's sequence length, the axis with most bytes sent first."""
    flows: dict[str, list[Flow]] = defaultdict(list)
    for flow in plan.flows[rank]:
        if not flow.first:
            flows[flow.axis].append(flow)
    found = []
    for axis, mine in flows.items():
        peers = plan.peers(rank, axis)
        nodes = len({peer // gpus_per_node for peer in peers})
        counted, sent = sum(flow.bytes for flow in mine), sum(sent_bytes(flow, len(peers)) for flow in mine)
        found.append(AxisTraffic(axis, len(peers), nodes, counted, sent))
    return tuple(sorted(found, key=lambda one: -one.sent))


def sent_bytes(flow: Flow, ranks: int) -> int:
    """What is received only is another rank's; what is passed on is counted as it is sent."""
    share = (ranks - 1) * flow.bytes // ranks
    if flow.op in ("all_gather", "reduce_scatter"):
        return share
    return {"all_reduce": 2 * share, "recv": 0}.get(flow.op, flow.bytes)
