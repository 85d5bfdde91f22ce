"""A layout of thousands of ranks on a page: groups and their links, kinds of ranks and their memory, what is idle or uneven.

All is computed from the plan. Nothing here was measured, and nothing is said of seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.core.case.case import Case
from harness.core.case.features import FEATURE_CHOICES
from harness.core.evidence.text import bytes_text
from harness.core.plan.figures.activations import activation_bytes
from harness.core.plan.figures.balance import attention_over_cp, layers_by_stage, matmuls_over_pp, rows_over_shards
from harness.core.plan.figures.gpus import GPUS
from harness.core.plan.figures.links import AxisTraffic, traffic_by_axis
from harness.core.plan.figures.pipeline_time import matmul_operations, other_schedules, pipeline_time
from harness.core.plan.figures.rank_bytes import ALLOCATOR, RankBytes, rank_bytes
from harness.core.plan.kinds import PerRank, Place, places_of_ranks
from harness.core.plan.plan import Plan
from harness.core.plan.stages import layers_of_stage
from harness.core.report.columns import columns
from harness.core.report.text import wrapped

SHOWN_KINDS = 24
BAR = 40  # letters for all of a GPU's memory
EMBEDDING = "tok_embeddings.weight"


def kinds_of(plan: Plan) -> list[list[int]]:
    """Ranks of one kind, in the order of their first ones."""
    found: dict[object, list[int]] = defaultdict(list)
    kinds = plan.flows.kinds if isinstance(plan.flows, PerRank) else {rank: rank for rank in plan.flows}
    for rank, kind in kinds.items():
        found[kind].append(rank)
    return list(found.values())


def groups_lines(plan: Plan) -> list[str]:
    """An axis a row: its groups, and the rank of all kinds that sends most over it in a step."""
    rows, sent = [["axis", "groups", "ranks", "the first one", "a rank sends a step, at most"]], sent_by_axis(plan)
    for axis, groups in plan.groups.items():
        rows.append([axis, f"{len(groups):,}", f"{len(groups[0]):,}", _members(groups[0]), sent.get(axis, "nothing")])
    return columns(rows)


def sent_by_axis(plan: Plan) -> dict[str, str]:
    """Return the most that a rank sends over each axis in a step, and over which links, in words."""
    return {one.axis: f"{bytes_text(one.sent)} {one.links}" for one in most_sent(plan)}


def most_sent(plan: Plan) -> list[AxisTraffic]:
    """Return by axis what the rank of all kinds sends that sends most over it in a step; most first."""
    most: dict[str, AxisTraffic] = {}
    for one in (one for ranks in kinds_of(plan) for one in traffic_by_axis(plan, ranks[0])):
        if one.axis not in most or one.sent > most[one.axis].sent:
            most[one.axis] = one
    return sorted(most.values(), key=lambda one: -one.sent)


def _members(group: Sequence[int]) -> str:
    return "[" + ",".join(map(str, group if len(group) < 3 else (*group[:2], "..", group[-1]))) + "]"


def kinds_lines(case: Case, plan: Plan) -> list[str]:
    """A kind of ranks a row, and what each of its ranks has."""
    rows = [["pp", "shards", "tp", "ranks", "layers", "stay", "gathered", "waiting", "kept", "backward", "loss"]]
    kinds, places = kinds_of(plan), places_of_ranks(case.data_dims)
    for ranks in kinds[:SHOWN_KINDS]:
        held = rank_bytes(case, plan, ranks[0])
        sizes = (held.stays, held.gathered, held.unreduced, held.activations, held.backward, held.loss)
        rows.append([*_where(case, plan, ranks, places), *(f"{size / 1e9:.3g}" for size in sizes)])
    rows = [
        list(row)
        for row in zip(*(column for column in zip(*rows, strict=True) if {*column[1:]} != {"all"}), strict=True)
    ]
    return [*columns(rows), *[f"  and {len(kinds) - SHOWN_KINDS} more kinds"] * (len(kinds) > SHOWN_KINDS)]


def _where(case: Case, plan: Plan, ranks: list[int], places: dict[int, Place]) -> list[str]:
    shards, tp = {places[rank].shard for rank in ranks}, {places[rank].tp for rank in ranks}
    stages = plan.stages[ranks[0]]
    layers = _spans(layer for stage in stages for layer in layers_of_stage(case, stage))
    named = [
        name
        for name, is_there in (("emb", 0 in stages), (layers, layers), ("out", case.n_stages - 1 in stages))
        if is_there
    ]
    cut = (
        "all" if len(at) == degree else _spans(sorted(at))
        for at, degree in ((shards, case.data_dims.shards), (tp, case.dims.tp))
    )
    return [str(places[ranks[0]].pp), *cut, f"{len(ranks):,}", "+".join(named)]


def _spans(numbers: Iterable[int]) -> str:
    """0-6 or 0,2-4; of many spans the first two."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    texts = ["-".join(map(str, span)) for span in spans]
    return ",".join(texts[:2]) + ",.." * (len(texts) > 2)


def memory_lines(case: Case, plan: Plan, gpu: str) -> list[str]:
    """Lines on the rank that has most: between steps exact, within a step by arithmetic, the last of it estimated."""
    rank, held = neediest(case, plan)
    room = GPUS[gpu] * 10**9
    parts = _parts(held)
    bar = "".join(letter * round(size / room * BAR) for _, letter, size in parts)
    rows = [[name, letter, bytes_text(size)] for name, letter, size in parts if size]
    return [
        f"  rank {rank}, and the {GPUS[gpu]} GB of {gpu}",
        *columns(rows, indent=4),
        f"    [{bar[:BAR]:<{BAR}}]{bar[BAR:][:20]}{'..' * (len(bar) > BAR + 20)}",
        *wrapped(f"at its most {most_text(held)}: {room_left(held.reserved, gpu)}", "    "),
        *wrapped(f"activations with activation_checkpointing {_recomputed(case, plan, rank)}", "    "),
    ]


def neediest(case: Case, plan: Plan) -> tuple[int, RankBytes]:
    """The rank that needs most memory, and what for."""
    first = (ranks[0] for ranks in kinds_of(plan))
    return max(((rank, rank_bytes(case, plan, rank)) for rank in first), key=lambda one: one[1].most)


def room_left(size: int, gpu: str) -> str:
    """Never that it fits."""
    room = GPUS[gpu] * 10**9
    return f"leaves {bytes_text(room - size)} for all that is not counted" if size <= room else "more than it has"


def most_text(held: RankBytes) -> str:
    """What is in use at the most, in which phase, and what an allocator reserves for it."""
    phase = {"loss": "of the loss", "backward": "of the last block"}[held.phase]
    return f"{bytes_text(held.most)}, in the backward {phase}, for which {bytes_text(held.reserved)} are reserved"


def _parts(held: RankBytes) -> list[tuple[str, str, int]]:
    """Return the parts in the phase in which there is most."""
    in_loss = held.phase == "loss"
    there = not in_loss or held.waiting
    return [
        ("parameters", "p", held.parameters),
        ("gradients", "g", held.gradients if there else 0),
        ("optimizer state", "o", held.optimizer),
        ("padding, at most", "-", held.padding),
        ("gathered parameters", "w", held.gathered_after_forward if in_loss else held.gathered),
        ("gradients not reduced yet", "u", held.unreduced if there else 0),
        ("activations, estimated", "a", held.activations),
        ("backward of a block, estimated", "b", 0 if in_loss else held.in_block),
        ("logits and their gradients", "l", held.in_loss if in_loss else 0),
        (f"an allocator's share, x {ALLOCATOR}", "~", held.reserved - held.most),
    ]


def _recomputed(case: Case, plan: Plan, rank: int) -> str:
    """The estimate for every setting."""
    found = []
    for kind in FEATURE_CHOICES["activation_checkpointing"]:
        other = replace(case, features=replace(case.features, activation_checkpointing=str(kind)))
        found.append(f"{kind} {bytes_text(activation_bytes(other, rank, plan.traits))}")
    return ", ".join(found)


def pipeline_lines(case: Case) -> list[str]:
    """Idle time, of what the busiest rank computes."""
    if case.dims.pp == 1:
        return []
    mine = pipeline_time(case, lambda stage: matmul_operations(case, stage))
    asked = f"{case.features.schedule}, {case.microbatches} microbatches, {case.n_stages} stages"
    others = (f"{name} {time.bubble:.1%}" for name, time in other_schedules(case) if name != case.features.schedule)
    rows = [
        [asked, f"{mine.bubble:.1%}", f"all together wait {mine.idle:.1%} of the time"],
        ["were all stages equal", f"{pipeline_time(case).bubble:.1%}", ""],
    ]
    return [*columns(rows), *wrapped(f"other schedules, two stages a rank: {', '.join(others)}", "  ", "  ")]


def balance_lines(case: Case, plan: Plan) -> list[str]:
    """Lines on how much more than the mean the busiest or largest has."""
    return columns([[one.what, f"+{one.excess:.1%}", one.why] for one in balance(case, plan)])


@dataclass(frozen=True)
class Uneven:
    """How unequal ranks are in one thing."""

    what: str
    """What was compared, over which axis."""
    excess: float
    """The most of any place along the axis, above the mean, as a part of the mean."""
    why: str
    """What it comes from, in words."""


def balance(case: Case, plan: Plan) -> Iterator[Uneven]:
    """Yield one for each axis that has something to divide."""
    if case.dims.pp > 1:
        layers = layers_by_stage(case)
        words = f"{min(layers)} to {max(layers)} layers a stage"
        yield Uneven("matmuls over pp", matmuls_over_pp(case).excess, words)
    if case.dims.cp > 1:
        asked, plain = attention_over_cp(case), attention_over_cp(case, load_balance=False)
        yield Uneven("causal attention over cp", asked.excess, f"without load balance +{plain.excess:.1%}")
    if plan.shards > 1 and not plan.flat and EMBEDDING in plan.shapes:
        held = rows_over_shards(case, plan, EMBEDDING)
        most, least, total = (
            int(size) // case.model.dim for size in (max(held.shares), min(held.shares), sum(held.shares))
        )
        yield Uneven("vocabulary over shards", held.excess, f"{least} to {most} rows of {total:,}")
