"""A plan as a person reads it: the rank grid, groups by axis, some slices, and the bytes that each axis must move."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from harness.core.case.case import Case
from harness.core.case.dims import AXES
from harness.core.evidence.text import bytes_text, ranks_text
from harness.core.plan.grid import coordinate
from harness.core.plan.plan import Plan
from harness.core.plan.slices import slice_text
from harness.core.report.layout_text import (
    balance_lines,
    groups_lines,
    kinds_lines,
    kinds_of,
    memory_lines,
    pipeline_lines,
)
from harness.core.report.text import wrapped
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
    """gpu: whose memory is compared with what a rank holds. set_aside: what of a file is not planned."""
    parts = wrapped(f"{case.name}: {plan.dims} = {plan.dims.world_size:,} ranks", "", "  ")
    parts += wrapped(case.why, "  ")
    parts += [line for text in _unusual(case) for line in wrapped(text, "  ", "    ")]
    parts += wrapped(f"not planned: {', '.join(set_aside)}", "  ", "    ") if set_aside else []
    for saved in case.resume:
        taken = "starts from the weights that" if saved.model_only else "resumes what"
        parts.append(f"  {taken} {saved.dims} saved after step {saved.after}")
    parts += _each_rank(plan) if plan.dims.world_size <= MOST_RANKS else ["", "groups", *groups_lines(plan)]
    return "\n".join([*parts, *_costs(case, plan, gpu)])


def _costs(case: Case, plan: Plan, gpu: str) -> list[str]:
    sections = {
        f"kinds of ranks: {len(kinds_of(plan))}; GB of each rank": kinds_lines(case, plan),
        "memory of the rank that needs most": memory_lines(case, plan, gpu),
        "time that the busiest rank of a pipeline waits, of what it computes": pipeline_lines(case),
        "imbalance: the most, above the mean": balance_lines(case, plan),
    }
    return [line for title, lines in sections.items() if lines for line in ("", title, *lines)]


def _each_rank(plan: Plan) -> list[str]:
    parts: list[str] = []
    parts += ["", "rank grid", *_table(_grid(plan))]
    parts += ["", "groups", *(_table(_groups(plan)) or ["  none: one rank"])]
    parts += ["", "slices that a rank holds", *_table(_slices(plan))]
    parts += [
        "",
        f"bytes of rank 0 in every {'' if plan.flows == plan.even_flows else 'odd '}step",
        *(_table(_flows(plan)) or ["  none"]),
    ]
    least, most = plan.parameter_bytes[0]
    return [*parts, "", f"parameters of rank 0: {bytes_text(least)}, with padding at most {bytes_text(most)}"]


def _unusual(case: Case) -> Iterator[str]:
    """What the case requests in addition to its dims."""
    for name in ("model", "features", "training"):
        record = getattr(case, name)
        if name == "model" and record == PRESETS.get(case.model.name) != PRESETS["debug"]:
            yield f"model: {case.model.name}, as published"
            continue
        fields = [field for field in dataclasses.fields(record) if getattr(record, field.name) != field.default]
        if fields:
            yield f"{name}: {', '.join(f'{field.name} {getattr(record, field.name)}' for field in fields)}"


def _grid(plan: Plan) -> Iterator[list[str]]:
    axes = [axis for axis in AXES if axis in plan.groups]
    yield ["rank", *axes]
    for rank in range(min(plan.dims.world_size, SHOWN_RANKS)):
        at = coordinate(plan.dims, rank)
        yield [str(rank), *(str(at[axis]) for axis in axes)]
    if plan.dims.world_size > SHOWN_RANKS:
        yield [f"and {plan.dims.world_size - SHOWN_RANKS} more"]


def _groups(plan: Plan) -> Iterator[list[str]]:
    for axis, groups in plan.groups.items():
        more = f" and {len(groups) - SHOWN_RANKS} more" if len(groups) > SHOWN_RANKS else ""
        yield [axis, " ".join(map(ranks_text, groups[:SHOWN_RANKS])) + more]


def _slices(plan: Plan) -> Iterator[list[str]]:
    for fqn in SHOWN_PARAMETERS:
        yield [f"{fqn} {list(plan.shapes[fqn])}"]
        held: dict[str, list[int]] = {}
        for rank, slices in plan.slices.items():
            if fqn in slices:
                held.setdefault(slice_text(slices[fqn], plan.shapes[fqn], flat=bool(plan.flat)), []).append(rank)
        yield from (["  " + ranks_text(ranks), text] for text, ranks in list(held.items())[:SHOWN_RANKS])


def _flows(plan: Plan) -> Iterator[list[str]]:
    for flow in plan.flows[0]:
        yield [
            flow.axis,
            flow.role,
            flow.op,
            flow.phase,
            bytes_text(flow.bytes) + (" (optional)" if flow.optional else ""),
        ]


def _table(rows: Iterator[list[str]]) -> list[str]:
    """Columns as wide as their longest cell; a row of one cell is a heading and widens none."""
    lines = list(rows)
    cells = [row for row in lines if len(row) > 1]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    return ["  " + "  ".join(_padded(row, widths)).rstrip() for row in lines]


def _padded(row: list[str], widths: list[int]) -> list[str]:
    return [cell.ljust(width) for cell, width in zip(row, widths, strict=True)] if len(row) > 1 else row
