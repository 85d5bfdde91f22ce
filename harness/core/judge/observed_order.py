"""Whether a job's pipelines are those of a layout whose ranks are counted in another order: pp not outermost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from harness.core.case.dims import AXES, ParallelDims
from harness.core.evidence.keys import ranks_of
from harness.core.evidence.summary import POINT_TO_POINT, Summary
from harness.core.evidence.text import ranks_text

Lines = set[tuple[int, ...]]


def other_order(summaries: Iterable[Summary], dims: ParallelDims) -> str:
    """What the layout says, what was observed, and what to write; empty where sends run over the layout's pipelines, or over
    those of no such order."""
    listed = list(summaries)
    sent = [use.ranks for one in listed for use in one.uses if use.op in POINT_TO_POINT]
    sent += [use.ranks for one in listed for use in one.outside if use.op in POINT_TO_POINT]
    seen = {tuple(ranks_of(ranks)) for ranks in sent}
    outer, *inner = axes = [axis for axis in AXES if getattr(dims, axis) > 1]
    if outer != "pp" or not seen or seen <= _pipelines(dims, axes):
        return ""
    orders = ([*inner[:place], "pp", *inner[place:]] for place in range(1, len(axes)))
    order = next((order for order in orders if seen <= _pipelines(dims, order)), None)
    if order is None:
        return ""
    return (
        f"the layout counts ranks in the order {', '.join(axes)}: pp groups {_text(_pipelines(dims, axes))}; sends and receives"
        f" run over {_text(seen)}, as in the order {', '.join(order)}, which is not judged: make the script's mesh with pp"
        f" first (init_device_mesh with mesh_dim_names {tuple(axes)}), or leave out --layout"
    )


def _pipelines(dims: ParallelDims, order: Sequence[str]) -> Lines:
    """The ranks that differ in pp alone, if the axes follow in this order, outermost first."""
    grid = np.arange(dims.world_size).reshape([getattr(dims, axis) for axis in order])
    lines = np.moveaxis(grid, order.index("pp"), -1).reshape(-1, dims.pp)
    return {tuple(map(int, line)) for line in lines}


def _text(lines: Lines, most: int = 4) -> str:
    shown = sorted(lines)
    return " ".join(map(ranks_text, shown[:most])) + (" .." if len(shown) > most else "")
