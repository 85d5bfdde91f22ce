"""Text on a layout of thousands of ranks: groups and their links, kinds of ranks and their memory, idle time and imbalance.

All is computed from the plan. Nothing here was measured, and nothing is said of seconds.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.core.case.case import Case
from harness.core.case.features import FEATURE_CHOICES
from harness.core.evidence.text import bytes_text
from harness.core.plan.figures.activations import kept_activation_bytes
from harness.core.plan.figures.balance import (
    attention_over_cp,
    layers_by_stage,
    matmuls_over_pp,
    rows_over_shards,
    unbalanced_attention_over_cp,
)
from harness.core.plan.figures.gpus import GPU_GIGABYTES
from harness.core.plan.figures.links import AxisTraffic, traffic_by_axis
from harness.core.plan.figures.pipeline_time import matmul_operations, pipeline_time, times_of_schedules
from harness.core.plan.figures.rank_bytes import ALLOCATOR_FACTOR, RankBytes, rank_bytes
from harness.core.plan.kinds import PerRank, ShardPlace, places_of_ranks
from harness.core.plan.plan import Plan
from harness.core.plan.stages import layers_of_stage
from harness.core.report.columns import column_lines
from harness.core.report.text import wrap_text

SHOWN_KINDS = 24
BAR_LETTERS = 40  # letters for all of a GPU's memory
EMBEDDING = "tok_embeddings.weight"


def rank_classes(plan: Plan) -> list[list[int]]:
    """Return the ranks of each rank class, in the order of their first ranks. Ranks of a class share all planned bytes."""
    ranks_by_kind: dict[object, list[int]] = defaultdict(list)
    kinds = plan.flows.kinds if isinstance(plan.flows, PerRank) else {rank: rank for rank in plan.flows}
    for rank, kind in kinds.items():
        ranks_by_kind[kind].append(rank)
    return list(ranks_by_kind.values())


def groups_lines(plan: Plan) -> list[str]:
    """Return a head and a row for each axis: its groups, and the most that a rank sends over it in a step."""
    rows = [["axis", "groups", "ranks", "the first one", "a rank sends a step, at most"]]
    sent = sent_texts_by_axis(plan)
    for axis, groups in plan.groups.items():
        rows.append(
            [axis, f"{len(groups):,}", f"{len(groups[0]):,}", _members_text(groups[0]), sent.get(axis, "nothing")]
        )
    return column_lines(rows)


def sent_texts_by_axis(plan: Plan) -> dict[str, str]:
    """Return, by axis, a text of the most that a rank sends over it in a step, and of the links."""
    return {traffic.axis: f"{bytes_text(traffic.sent)} {traffic.links}" for traffic in largest_traffic_by_axis(plan)}


def largest_traffic_by_axis(plan: Plan) -> list[AxisTraffic]:
    """Return, for each axis, the traffic of the rank that sends most over it in a step; the largest first."""
    largest: dict[str, AxisTraffic] = {}
    for ranks in rank_classes(plan):
        for traffic in traffic_by_axis(plan, ranks[0]):
            if traffic.axis not in largest or traffic.sent > largest[traffic.axis].sent:
                largest[traffic.axis] = traffic
    return sorted(largest.values(), key=lambda traffic: -traffic.sent)


def _members_text(group: Sequence[int]) -> str:
    """Return the ranks of a group as text: "[0,1,..,7]"; of one or two ranks all."""
    shown = group if len(group) < 3 else (*group[:2], "..", group[-1])
    return "[" + ",".join(map(str, shown)) + "]"


def kinds_lines(case: Case, plan: Plan) -> list[str]:
    """Return a head and a row for each rank class: its coordinates, and the GB of each kind that one of its ranks has.

    Classes beyond SHOWN_KINDS are only counted. A column that says "all" in every row is left out.
    """
    rows = [["pp", "shards", "tp", "ranks", "layers", "stay", "gathered", "waiting", "kept", "backward", "loss"]]
    kinds = rank_classes(plan)
    places = places_of_ranks(case.data_dims)
    for ranks in kinds[:SHOWN_KINDS]:
        memory = rank_bytes(case, plan, ranks[0])
        sizes = (
            memory.between_steps,
            memory.gathered,
            memory.unreduced,
            memory.activations,
            memory.backward_peak,
            memory.loss_peak,
        )
        rows.append([*_cells_of_class(case, plan, ranks, places), *(f"{size / 1e9:.3g}" for size in sizes)])
    # A column with nothing but "all" below its head is left out.
    kept_columns = [column for column in zip(*rows, strict=True) if {*column[1:]} != {"all"}]
    lines = column_lines([list(row) for row in zip(*kept_columns, strict=True)])
    if len(kinds) > SHOWN_KINDS:
        lines.append(f"  and {len(kinds) - SHOWN_KINDS} more kinds")
    return lines


def _cells_of_class(case: Case, plan: Plan, ranks: list[int], places: dict[int, ShardPlace]) -> list[str]:
    """Return the first cells of a rank class's row: pp, shards, tp, number of ranks, layers."""
    stages = plan.stages[ranks[0]]
    layers = _spans_text(itertools.chain.from_iterable(layers_of_stage(case, stage) for stage in stages))
    modules = []
    if 0 in stages:
        modules.append("emb")
    if layers:
        modules.append(layers)
    if case.n_stages - 1 in stages:
        modules.append("out")
    shards = _indices_text({places[rank].shard for rank in ranks}, case.data_dims.shards)
    tp = _indices_text({places[rank].tp for rank in ranks}, case.dims.tp)
    return [str(places[ranks[0]].pp), shards, tp, f"{len(ranks):,}", "+".join(modules)]


def _indices_text(indices: set[int], degree: int) -> str:
    return "all" if len(indices) == degree else _spans_text(sorted(indices))


def _spans_text(numbers: Iterable[int]) -> str:
    """Return numbers as text: "0-6", "0,2-4"; of many spans the first two, and "..": "0,2,.."."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    texts = ["-".join(map(str, span)) for span in spans]
    if len(texts) > 2:
        return ",".join(texts[:2]) + ",.."
    return ",".join(texts)


def memory_lines(case: Case, plan: Plan, gpu: str) -> list[str]:
    """Return lines on the memory of the rank that needs most, with a bar beside a GPU's memory.

    gpu: a name in GPU_GIGABYTES. Activations and the block in backward are estimated.
    """
    rank, memory = neediest_rank(case, plan)
    room = GPU_GIGABYTES[gpu] * 10**9
    parts = _memory_parts(memory)
    bar = "".join(letter * round(size / room * BAR_LETTERS) for _, letter, size in parts)
    cut_mark = ".." if len(bar) > BAR_LETTERS + 20 else ""
    rows = [[name, letter, bytes_text(size)] for name, letter, size in parts if size]
    return [
        f"  rank {rank}, and the {GPU_GIGABYTES[gpu]} GB of {gpu}",
        *column_lines(rows, indent=4),
        f"    [{bar[:BAR_LETTERS]:<{BAR_LETTERS}}]{bar[BAR_LETTERS:][:20]}{cut_mark}",
        *wrap_text(f"at its most {peak_memory_text(memory)}: {room_left_text(memory.reserved, gpu)}", "    "),
        *wrap_text(
            f"activations with activation_checkpointing {_activations_by_checkpointing(case, plan, rank)}", "    "
        ),
    ]


def neediest_rank(case: Case, plan: Plan) -> tuple[int, RankBytes]:
    """Return the rank with the highest peak of memory, and its bytes by kind. One rank of each class is examined."""
    representatives = (ranks[0] for ranks in rank_classes(plan))
    candidates = ((rank, rank_bytes(case, plan, rank)) for rank in representatives)
    return max(candidates, key=lambda candidate: candidate[1].peak)


def room_left_text(size: int, gpu: str) -> str:
    """Return "leaves 3.2 GB for all that is not counted", or "more than it has". size: bytes. gpu: a name in GPU_GIGABYTES.

    It never claims that the job fits.
    """
    room = GPU_GIGABYTES[gpu] * 10**9
    if size <= room:
        return f"leaves {bytes_text(room - size)} for all that is not counted"
    return "more than it has"


def peak_memory_text(memory: RankBytes) -> str:
    """Return a text of a rank's largest memory in use, of its phase, and of the bytes that an allocator reserves for it."""
    phase = {"loss": "of the loss", "backward": "of the last block"}[memory.peak_phase]
    return f"{bytes_text(memory.peak)}, in the backward {phase}, for which {bytes_text(memory.reserved)} are reserved"


def _memory_parts(memory: RankBytes) -> list[tuple[str, str, int]]:
    """Return (name, letter, bytes) of each part of a rank's memory, in the phase in which it needs most."""
    in_loss = memory.peak_phase == "loss"
    has_gradients = not in_loss or memory.waiting
    return [
        ("parameters", "p", memory.parameters),
        ("gradients", "g", memory.gradients if has_gradients else 0),
        ("optimizer state", "o", memory.optimizer),
        ("padding, at most", "-", memory.padding),
        ("gathered parameters", "w", memory.gathered_after_forward if in_loss else memory.gathered),
        ("gradients not reduced yet", "u", memory.unreduced if has_gradients else 0),
        ("activations, estimated", "a", memory.activations),
        ("backward of a block, estimated", "b", 0 if in_loss else memory.in_block),
        ("logits and their gradients", "l", memory.in_loss if in_loss else 0),
        (f"an allocator's share, x {ALLOCATOR_FACTOR}", "~", memory.reserved - memory.peak),
    ]


def _activations_by_checkpointing(case: Case, plan: Plan, rank: int) -> str:
    """Return a text of the estimated bytes of activations for every setting of activation checkpointing."""
    texts = []
    for kind in FEATURE_CHOICES["activation_checkpointing"]:
        changed_case = replace(case, features=replace(case.features, activation_checkpointing=str(kind)))
        texts.append(f"{kind} {bytes_text(kept_activation_bytes(changed_case, rank, plan.traits))}")
    return ", ".join(texts)


def pipeline_lines(case: Case) -> list[str]:
    """Return lines on the idle time of a pipeline, as a share of the busiest rank's work. Empty without a pipeline."""
    if case.dims.pp == 1:
        return []
    time_of_case = pipeline_time(case, lambda stage: matmul_operations(case, stage))
    requested = f"{case.features.schedule}, {case.microbatches} microbatches, {case.n_stages} stages"
    others = (
        f"{name} {time.bubble_ratio:.1%}" for name, time in times_of_schedules(case) if name != case.features.schedule
    )
    rows = [
        [requested, f"{time_of_case.bubble_ratio:.1%}", f"all together wait {time_of_case.idle_ratio:.1%} of the time"],
        ["were all stages equal", f"{pipeline_time(case).bubble_ratio:.1%}", ""],
    ]
    return [*column_lines(rows), *wrap_text(f"other schedules, two stages a rank: {', '.join(others)}", "  ", "  ")]


def balance_lines(case: Case, plan: Plan) -> list[str]:
    """Return a line for each imbalance of the layout: what, by which part the most exceeds the mean, why.

    Empty if there is none.
    """
    return column_lines([[uneven.what, f"+{uneven.excess:.1%}", uneven.why] for uneven in imbalances(case, plan)])


@dataclass(frozen=True)
class Imbalance:
    """The inequality of ranks along one axis in one quantity."""

    what: str
    """What was compared, over which axis."""
    excess: float
    """The most of any place along the axis, above the mean, as a part of the mean."""
    why: str
    """What it comes from, in words."""


def imbalances(case: Case, plan: Plan) -> Iterator[Imbalance]:
    """Yield the imbalance of matmuls over pp, of attention over cp and of the vocabulary over shards, each if its
    degree exceeds 1.

    The vocabulary is left out where parameters are cut as flat vectors.
    """
    if case.dims.pp > 1:
        layers = layers_by_stage(case)
        words = f"{min(layers)} to {max(layers)} layers a stage"
        yield Imbalance("matmuls over pp", matmuls_over_pp(case).excess, words)
    if case.dims.cp > 1:
        requested = attention_over_cp(case)
        unbalanced = unbalanced_attention_over_cp(case)
        yield Imbalance("causal attention over cp", requested.excess, f"without load balance +{unbalanced.excess:.1%}")
    if plan.shard_degree > 1 and not plan.flat and EMBEDDING in plan.shapes:
        vocabulary = rows_over_shards(case, plan, EMBEDDING)
        most_rows = int(max(vocabulary.shares)) // case.model.dim
        least_rows = int(min(vocabulary.shares)) // case.model.dim
        all_rows = int(sum(vocabulary.shares)) // case.model.dim
        text = f"{least_rows} to {most_rows} rows of {all_rows:,}"
        yield Imbalance("vocabulary over shards", vocabulary.excess, text)
