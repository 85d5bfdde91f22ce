"""Checks that need only digests: they judge a recorded job without values and without a reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from harness.evidence.keys import ranks_of, steps_text
from harness.evidence.summary import POINT_TO_POINT, Outside, Summary, Use
from harness.evidence.text import ranks_text
from harness.judge.observed import copied, differing, replicas
from harness.judge.observed_order import other_order
from harness.judge.result import Finding, Result, Verdict, not_applicable, verdict_of
from harness.judge.separate_models import joined_sets
from harness.plan.grid import coordinate
from harness.plan.slices import BYTES
from harness.spec.dims import ParallelDims

NOTHING = "nothing was examined"
UNREAD = (
    "no parameter was read after a step: optimizers step on tensors that are not the model's parameters, as ZeRO's do, so these"
    " are read in the next recorded step; record two steps or more in a row (--steps 1-3)"
)
UNSTEPPED = "no parameter was read after a step: no step of an optimizer was over"


def observed_checks(summaries: Sequence[Summary], dims: ParallelDims) -> tuple[Result, ...]:
    partial, failed = not_recorded(summaries), recorder_failed(summaries)
    agreement, numbers = (
        as_far_as_seen(one, partial) for one in (replica_agreement(summaries, dims), finite(summaries))
    )
    found = (exchange(summaries, dims), agreement, samples(summaries, dims), numbers)
    return tuple(
        replace(one, verdict=Verdict.UNKNOWN, note=NOTHING) if one.verdict is Verdict.PASS and not one.examined else one
        for one in (as_far_as_seen(one, failed) for one in found)
    )


def not_recorded(summaries: Iterable[Summary]) -> str:
    """Which models, or the beginning of which, are not on record; empty if all are."""
    return next((f"not recorded: {one.left_out[0]}" for one in summaries if one.left_out), "")


def recorder_failed(summaries: Iterable[Summary]) -> str:
    """Where the recorder itself raised, and what; empty if nowhere."""
    return next((f"rank {one.rank} is not recorded to its end: {one.failed[0]}" for one in summaries if one.failed), "")


def as_far_as_seen(result: Result, unseen: str) -> Result:
    """A check that passes of what was seen may be broken by what was not."""
    if unseen and result.verdict is Verdict.PASS:
        return replace(result, verdict=Verdict.UNKNOWN, note=unseen)
    return result


def exchange(summaries: Sequence[Summary], dims: ParallelDims) -> Result:
    """Over the ranks of each tp, cp and pp group something moves: none of them is possible without. Of a group that lies
    within one of FSDP's nobody can say what moves there for which of them; nor where all that moves may be gradients that
    are summed, and buffers that replicas of data parallelism share."""
    axes = [axis for axis in ("tp", "cp", "pp") if getattr(dims, axis) > 1]
    if not axes:
        return not_applicable("exchange", "neither tensor, context nor pipeline parallelism")
    judged = [one for one in summaries if one.shown and not one.failed and one.rank < dims.world_size]
    findings: list[Finding] = []
    untold: list[str] = []
    for axis in axes:
        lines = _lines(dims, axis)
        for one in judged:
            moved = _moved(one, lines[one.rank], between_passes=axis == "pp")
            told = f"its {axis} group {ranks_text(lines[one.rank])}"
            if not moved:
                where = "" if axis == "pp" else " in forward or backward"
                wanted = f"collectives{where} over {told}"
                findings.append(Finding.at(one.rank, wanted, "none", step=one.shown, name=axis))
            elif not any(TELLING[axis](use.op, use.phase) and not _of_shards(one, use, axis) for use in moved):
                ops = ", ".join(sorted({f"{use.op} in {use.phase}" for use in moved}))
                untold.append(f"rank {one.rank}, {told}: {ops} may be of another axis")
        untold += _began_alike(judged, lines) if axis == "pp" else []
    hint = other_order(judged, dims) if findings or untold else ""
    found = verdict_of("exchange", findings, len(judged), note=hint)
    return found if findings or not untold else replace(found, verdict=Verdict.UNKNOWN, note=hint or untold[0])


TELLING: dict[str, Callable[[str, str], bool]] = {
    "tp": lambda op, phase: op not in ("broadcast", *POINT_TO_POINT) and phase != "backward",
    "cp": lambda op, phase: op not in ("all_reduce", "broadcast"),
    "pp": lambda op, phase: op in POINT_TO_POINT,
}
"""By axis, whether a collective of this phase is none that data parallelism without shards has, too; nor a ring, of tp."""


GATHERED = BYTES | {"float16": 2}
"""Of a number that FSDP gathers, which may be in a dtype that no case requests."""


def _of_shards(one: Summary, use: Use | Outside, axis: str) -> bool:
    """Whether it may be what a wrapper moves that says that it shards over these ranks. cp may share FSDP's ranks: then it is
    what is gathered or scattered in backward, and what is gathered in forward if that is the parameters, once or several
    times. Who exchanges keys and values there gathers other bytes, or uses another collective."""
    if not one.roles.get(use.ranks, "").startswith("sharded") or axis == "pp":
        return False
    if axis == "tp":
        return True
    if use.phase == "backward":
        return use.op in ("all_gather", "reduce_scatter")
    whole = one.elements * GATHERED.get(use.dtype, 0)
    return (use.op, use.phase) == ("all_gather", "forward") and whole > 0 and use.bytes % whole == 0


def _began_alike(judged: Sequence[Summary], lines: dict[int, tuple[int, ...]]) -> list[str]:
    """Ranks that claim nothing and begin with the same bytes of all parameters may be replicas: cp sends, too."""
    found: dict[object, list[int]] = {}
    for one in judged:
        if not one.slices and 0 in one.contents:
            found.setdefault((lines[one.rank], one.model, one.contents[0]), []).append(one.rank)
    alike = [ranks for ranks in found.values() if len(ranks) > 1]
    return [f"ranks {ranks_text(ranks)} of a pp group begin with the same bytes, as replicas do" for ranks in alike]


def _moved(one: Summary, line: tuple[int, ...], *, between_passes: bool) -> list[Use | Outside]:
    """What it ran over itself and at least one other of these ranks. Stages of a pipeline send between passes, too."""
    uses: tuple[Use | Outside, ...] = (*one.uses, *one.outside, *one.background) if between_passes else one.uses
    return [use for use in uses if len(set(line).intersection(ranks_of(use.ranks))) > 1]


def _lines(dims: ParallelDims, axis: str) -> dict[int, tuple[int, ...]]:
    """By rank, the ranks that differ from it in this axis alone."""
    at = {rank: coordinate(dims, rank) for rank in range(dims.world_size)}
    found: dict[tuple[int, ...], list[int]] = {}
    places = {rank: tuple(place for name, place in where.items() if name != axis) for rank, where in at.items()}
    for rank, place in places.items():
        found.setdefault(place, []).append(rank)
    return {rank: tuple(found[place]) for rank, place in places.items()}


def replica_agreement(summaries: Sequence[Summary], dims: ParallelDims) -> Result:
    """Ranks that claim the same parts of all parameters hold the same bytes of them after every step recorded. So do ranks over
    which DTensors copy some parameters and cut others (norms under tensor parallelism), of those that are copied; and ranks
    that claim nothing, are replicas by the layout, and began with the same bytes. The same holds of a parameter that a wrapper
    was told to ignore."""
    apart, compared = _ignored_replicas(summaries, dims)
    families = [*replicas(summaries), *copied(summaries), *_replicas_by_layout(summaries, dims)]
    if others := _other_parameters(summaries, dims):
        told = f"ranks {ranks_text(others)} are replicas by the layout but have other parameters, as pipeline stages do"
        return Result("replica_agreement", Verdict.UNKNOWN, note=told)
    parted = _parted_replicas(summaries, dims)
    if not families and not compared and not parted:
        none = "no two ranks claim the same parts of all parameters"
        return not_applicable("replica_agreement", f"{none}, or are replicas by the layout and began alike")
    findings = [
        Finding(
            f"ranks {ranks_text(others)}, after step {step}", f"the bytes of ranks {ranks_text(most)}", "other bytes"
        )
        for step, pairs in differing(families).items()
        for most, others in pairs
    ]
    examined = compared + _compared(families) + len(parted)
    if not examined and any(one.shown and 0 in one.contents for one in summaries):
        stepped = any(one.optimizers for one in summaries)
        return Result("replica_agreement", Verdict.UNKNOWN, note=UNREAD if stepped else UNSTEPPED)
    return verdict_of("replica_agreement", [*findings, *apart, *parted], examined)


def _parted_replicas(summaries: Sequence[Summary], dims: ParallelDims) -> list[Finding]:
    """Those of one line that nothing joins: gradients are reduced between none of them, whatever they began with. Of ranks that
    claim something or began alike the bytes are compared."""
    home = {rank: ranks for ranks in joined_sets(summaries) for rank in ranks}
    lines = _lines(dims, "dp_replicate") if dims.world_size == len(home) else {}
    began = {one.rank: (one.contents.get(0), one.slices) for one in summaries}
    findings = []
    for line in sorted(set(lines.values())):
        sets = sorted({home[rank] for rank in line})
        if len(sets) > 1 and len({began[rank] for rank in line}) == len(line):
            text = " and ".join(ranks_text(ranks) for ranks in sets[:2]) + " and others" * (len(sets) > 2)
            none = f"none between {text} in forward or backward of step {summaries[0].shown}, nor outside as much"
            findings.append(Finding(f"replicas {ranks_text(line)}", "collectives that reduce gradients", none))
    return findings


def _compared(families: Sequence[list[Summary]]) -> int:
    return sum((len(family) - 1) * len([s for s in family[0].contents if s]) for family in families)


def _ignored_replicas(summaries: Sequence[Summary], dims: ParallelDims) -> tuple[list[Finding], int]:
    """The first step after which each of them differs, and how many were compared."""
    findings, compared = [], 0
    for fqn in sorted({fqn for one in summaries for fqn in one.ignored}):
        alone = [replace(one, slices=0, model=0, contents=one.ignored[fqn]) for one in summaries if fqn in one.ignored]
        families = _replicas_by_layout(alone, dims)
        compared += _compared(families)
        for step, ((most, others), *_) in list(differing(families).items())[:1]:
            where = f"ranks {ranks_text(others)}, after step {step}, {fqn}"
            text = "other bytes; they began alike, and its wrapper is told to ignore it"
            findings.append(Finding(where, f"the bytes of ranks {ranks_text(most)}", text))
    return findings, compared


def _other_parameters(summaries: Sequence[Summary], dims: ParallelDims) -> tuple[int, ...]:
    """Ranks that claim nothing, differ in dp_replicate alone, and have parameters of other names or shapes: by a mistake, or
    as experts that are spread over them have."""
    lines = _lines(dims, "dp_replicate")
    models = {one.rank: one.model for one in summaries if not one.slices and one.rank in lines}
    for line in lines.values():
        if len({models[rank] for rank in line if rank in models}) > 1:
            return line
    return ()


def _replicas_by_layout(summaries: Sequence[Summary], dims: ParallelDims) -> list[list[Summary]]:
    """Of a job without wrappers: ranks that differ in dp_replicate, and in cp where nothing shards over it, whose parameters
    are the same ones with the same bytes before the first step. Who cuts them by hand begins with other bytes."""
    found: dict[tuple[object, ...], list[Summary]] = {}
    for one in summaries:
        if not one.slices and one.rank < dims.world_size and 0 in one.contents:
            at = coordinate(dims, one.rank)
            cp = at["cp"] if dims.dp_shard > 1 else 0
            found.setdefault((at["pp"], at["dp_shard"], cp, at["tp"], one.model, one.contents[0]), []).append(one)
    return [family for family in found.values() if len(family) > 1]


def samples(summaries: Sequence[Summary], dims: ParallelDims) -> Result:
    """No two data-parallel ranks are fed the same in every step, and tp peers are fed the same tokens in each. Inputs that are
    no integers may be cut over tp, as activations are under sequence parallelism; ranks that differ in another axis are not
    compared."""
    judged = [one for one in summaries if one.rank < dims.world_size]
    apart, compared = _other_tokens(judged, dims)
    if dims.dp == 1:
        none = not_applicable("samples", "no data parallelism" + ", and tp ranks are fed no tokens" * (dims.tp > 1))
        return verdict_of("samples", apart, compared) if compared else none
    fed = {one.rank: tuple(sorted(one.fed.items())) for one in judged if one.fed}
    if len(fed) < len(summaries) and not apart:
        return Result("samples", Verdict.UNKNOWN, note="no input tensor of a model was seen")
    return verdict_of("samples", [*apart, *_fed_alike(fed, dims)], len(fed))


def _other_tokens(judged: Sequence[Summary], dims: ParallelDims) -> tuple[list[Finding], int]:
    """By the first of its tp peers, each rank that was fed other tokens than that one; and how many were compared."""
    tokens = {one.rank: one.tokens for one in judged if one.tokens}
    findings, compared = [], 0
    for first, *peers in sorted(set(_lines(dims, "tp").values())):
        for rank in (peer for peer in peers if first in tokens and peer in tokens):
            both = sorted(tokens[first].keys() & tokens[rank].keys())
            compared += len(both)
            if other := tuple(step for step in both if tokens[rank][step] != tokens[first][step]):
                text = f"others in {steps_text(other)}"
                findings.append(Finding.at(rank, f"the tokens of its tp peer, rank {first}", text))
    return findings, compared


def _fed_alike(fed: dict[int, tuple[tuple[int, int], ...]], dims: ParallelDims) -> list[Finding]:
    planes: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(fed):
        at = coordinate(dims, rank)
        planes.setdefault((at["pp"], at["cp"], at["tp"]), []).append(rank)
    findings = []
    for ranks in planes.values():
        ordered = sorted(ranks, key=lambda rank: fed[rank])
        for _, alike in itertools.groupby(ordered, key=lambda rank: fed[rank]):
            if len(same := sorted(alike)) > 1:
                text = f"the same in {steps_text(tuple(step for step, _ in fed[same[0]]))}"
                findings.append(Finding(f"ranks {ranks_text(same)}", "other samples on each data-parallel rank", text))
    return findings


def finite(summaries: Sequence[Summary]) -> Result:
    """Parameters are finite numbers after every step recorded."""
    findings = [
        Finding.at(one.rank, "finite numbers", f"others in {len(names)} parameters", step=step, name=names[0])
        for one in summaries
        for step, names in sorted(one.not_finite.items())
    ]
    return verdict_of("finite", findings, sum(len(one.contents) for one in summaries))
