"""Text on a plan: the rank grid, groups by axis, some slices, and the bytes that each axis must move."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from harness.core.case.case import Case
from harness.core.case.dims import AXES
from harness.core.evidence.text import bytes_text, ranks_text
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.plan import Plan
from harness.core.plan.slices import slice_text
from harness.core.report.layout_text import (
    balance_lines,
    groups_lines,
    kinds_lines,
    memory_lines,
    pipeline_lines,
    rank_classes,
)
from harness.core.report.text import wrap_text
from harness.reference.config import PRESETS

SHOWN_RANKS = 16
MOST_RANKS = 64  # of more, only kinds are shown
SHOWN_PARAMETERS = (
    "tok_embeddings.weight",
    "layers.0.attention.wq.weight",
    "layers.0.attention.wo.weight",
    "layers.0.attention_norm.weight",
)  # one for each way of being cut: by rows, by columns, not by tp


def plan_text(case: Case, plan: Plan, gpu: str = "H100", *, set_aside: Sequence[str] = ()) -> str:
    """Return a plan as text: the rank grid or the groups, slices, bytes, memory, idle time and imbalance.

    Of more than MOST_RANKS ranks only groups and kinds are shown. gpu: its memory is compared with the bytes of a rank.
    set_aside: settings of a file that are not planned.
    """
    parts = wrap_text(f"{case.name}: {plan.dims} = {plan.dims.world_size:,} ranks", "", "  ")
    parts += wrap_text(case.why, "  ")
    for text in _unusual_settings(case):
        parts += wrap_text(text, "  ", "    ")
    if set_aside:
        parts += wrap_text(f"not planned: {', '.join(set_aside)}", "  ", "    ")
    for saved in case.resume:
        start = "starts from the weights that" if saved.model_only else "resumes what"
        parts.append(f"  {start} {saved.dims} saved after step {saved.after}")
    parts += _rank_lines(plan) if plan.dims.world_size <= MOST_RANKS else ["", "groups", *groups_lines(plan)]
    return "\n".join([*parts, *_cost_lines(case, plan, gpu)])


def _cost_lines(case: Case, plan: Plan, gpu: str) -> list[str]:
    """Return the lines on what a layout costs: kinds of ranks, memory, idle time, imbalance.

    Sections without lines are left out.
    """
    sections = {
        f"kinds of ranks: {len(rank_classes(plan))}; GB of each rank": kinds_lines(case, plan),
        "memory of the rank that needs most": memory_lines(case, plan, gpu),
        "time that the busiest rank of a pipeline waits, of what it computes": pipeline_lines(case),
        "imbalance: the most, above the mean": balance_lines(case, plan),
    }
    parts: list[str] = []
    for title, lines in sections.items():
        if lines:
            parts += ["", title, *lines]
    return parts


def _rank_lines(plan: Plan) -> list[str]:
    """Return the lines on single ranks: rank grid, groups, slices of some parameters, traffic and parameter bytes of
    rank 0."""
    parts: list[str] = []
    parts += ["", "rank grid", *_table_lines(_grid_rows(plan))]
    parts += ["", "groups", *(_table_lines(_group_rows(plan)) or ["  none: one rank"])]
    parts += ["", "slices that a rank holds", *_table_lines(_slice_rows(plan))]
    parts += [
        "",
        f"bytes of rank 0 in every {'' if plan.flows == plan.even_flows else 'odd '}step",
        *(_table_lines(_flow_rows(plan)) or ["  none"]),
    ]
    slice_bytes, padded_bytes = plan.parameter_bytes[0]
    return [
        *parts,
        "",
        f"parameters of rank 0: {bytes_text(slice_bytes)}, with padding at most {bytes_text(padded_bytes)}",
    ]


def _unusual_settings(case: Case) -> Iterator[str]:
    """Yield a line for each of model, features and training that has settings other than the defaults.

    A published preset is named alone, without its settings.
    """
    for name in ("model", "features", "training"):
        record = getattr(case, name)
        if name == "model" and record == PRESETS.get(case.model.name) != PRESETS["debug"]:
            yield f"model: {case.model.name}, as published"
            continue
        fields = [field for field in dataclasses.fields(record) if getattr(record, field.name) != field.default]
        if fields:
            yield f"{name}: {', '.join(f'{field.name} {getattr(record, field.name)}' for field in fields)}"


def _grid_rows(plan: Plan) -> Iterator[list[str]]:
    """Yield a head, and the coordinate of each of the first SHOWN_RANKS ranks on axes of degree above 1; then how many
    more."""
    axes = [axis for axis in AXES if axis in plan.groups]
    yield ["rank", *axes]
    for rank in range(min(plan.dims.world_size, SHOWN_RANKS)):
        mesh_coordinate = coordinate_of_rank(plan.dims, rank)
        yield [str(rank), *(str(mesh_coordinate[axis]) for axis in axes)]
    if plan.dims.world_size > SHOWN_RANKS:
        yield [f"and {plan.dims.world_size - SHOWN_RANKS} more"]


def _group_rows(plan: Plan) -> Iterator[list[str]]:
    """Yield a row for each axis: its name and its first SHOWN_RANKS groups, and how many more there are."""
    for axis, groups in plan.groups.items():
        text = " ".join(map(ranks_text, groups[:SHOWN_RANKS]))
        if len(groups) > SHOWN_RANKS:
            text += f" and {len(groups) - SHOWN_RANKS} more"
        yield [axis, text]


def _slice_rows(plan: Plan) -> Iterator[list[str]]:
    """Yield, for each of SHOWN_PARAMETERS, a heading and a row for each different slice, with the ranks that hold it."""
    for fqn in SHOWN_PARAMETERS:
        yield [f"{fqn} {list(plan.shapes[fqn])}"]
        ranks_by_slice: dict[str, list[int]] = {}
        for rank, slices in plan.slices.items():
            if fqn in slices:
                text = slice_text(slices[fqn], plan.shapes[fqn], flat=bool(plan.flat))
                ranks_by_slice.setdefault(text, []).append(rank)
        for text, ranks in list(ranks_by_slice.items())[:SHOWN_RANKS]:
            yield ["  " + ranks_text(ranks), text]


def _flow_rows(plan: Plan) -> Iterator[list[str]]:
    """Yield a row for each flow of rank 0: axis, role, operator, phase, bytes."""
    for flow in plan.flows[0]:
        yield [
            flow.axis,
            flow.role,
            flow.op,
            flow.phase,
            bytes_text(flow.bytes) + (" (optional)" if flow.optional else ""),
        ]


def _table_lines(rows: Iterator[list[str]]) -> list[str]:
    """Return rows of cells as lines, columns as wide as their longest cell. A row of one cell is a heading and widens none."""
    all_rows = list(rows)
    rows_of_cells = [row for row in all_rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*rows_of_cells, strict=True)]
    return ["  " + "  ".join(_pad_row(row, widths)).rstrip() for row in all_rows]


def _pad_row(row: list[str], widths: list[int]) -> list[str]:
    """Return the cells of a row padded to the widths of their columns; a row of one cell unchanged."""
    if len(row) <= 1:
        return row
    return [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
