"""Findings of several laws -> one named cause, in the field's words, and the evidence for it in a few lines.

Each rule below knows one kind of cause and looks at the trial itself, not at the wording of findings. Rules are tried in
the order in which one mistake leads to others: a dead rank explains missing evidence, a wrong layout explains traffic, a
wrong sample explains a wrong gradient. The first that answers names the cause.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from harness import attribution, plan
from harness.case import AXES, ParallelDims
from harness.checks.samples import shares_of_samples
from harness.checks.traffic import observed as observed_traffic
from harness.plan import Slice
from harness.tolerance import clip_coefficient
from harness.trial import Result, Trial, Verdict, bytes_text, ranks_text, take

Lines = list[tuple[str, str]]


@dataclass(frozen=True)
class Diagnosis:
    """cause: one line. evidence: (label, text), what was expected and observed."""

    cause: str
    evidence: tuple[tuple[str, str], ...] = ()


def diagnose(trial: Trial, results: Sequence[Result]) -> Diagnosis | None:
    """None if no law is broken."""
    broken = {result.check: result for result in results if result.verdict is Verdict.FAIL}
    if not broken:
        return None
    complete = len(trial.ranks) == trial.run.world_size
    for rule in RULES if complete else [_process_died]:
        found = rule(trial, broken)
        if found is not None:
            return dataclasses.replace(found, evidence=(*found.evidence, *_what_the_numbers_say(trial, results)))
    return Diagnosis(_plain_summary(broken))


# ---- processes


def _process_died(trial: Trial, broken: dict[str, Result]) -> Diagnosis | None:
    blamed = [exit for exit in trial.run.exits if exit.blamed]
    victims = [exit.rank for exit in trial.run.exits if exit.how != "ok" and not exit.blamed]
    if not blamed:
        return None
    first, names = blamed[0], ranks_text([exit.rank for exit in blamed])
    who = f"rank {first.rank}" if len(blamed) == 1 else f"ranks {names}"
    did = {"signal": f"died by {first.signal}", "raised": "raised", "killed": "hung", "ok": "left early"}
    ended = did.get(first.how, first.how)
    told = first.error.removeprefix(ended).lstrip(", ").rstrip(".")
    cause = f"{who} {ended}" + (f": {told}" if told else "")
    lines = [(f"rank {exit.rank}", f"last collective {exit.last_collective}") for exit in blamed[:2] if exit.last_collective]
    lines += [("stack" if not i else "", line.strip()) for i, line in enumerate(first.stack.splitlines()[:4])]
    if victims:
        lines.append(("not to blame", f"ranks {ranks_text(victims)} only waited"))
    return Diagnosis(cause, tuple(lines))


# ---- layout


@dataclass(frozen=True)
class Layout:
    """A way the ranks could hold the parameters: the order of axes in the rank grid, which axes shard, whether tp cuts."""

    order: tuple[str, ...]
    sharded_by: tuple[str, ...]
    tensor_parallel: bool

    def slices(self, dims: ParallelDims, rank: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, Slice]:
        place = np.unravel_index(rank, tuple(getattr(dims, axis) for axis in self.order))
        at = dict(zip(self.order, map(int, place), strict=True))
        degrees = [getattr(dims, axis) for axis in self.sharded_by]
        index = int(np.ravel_multi_index([at[axis] for axis in self.sharded_by], degrees)) if degrees else 0
        tp = (dims.tp, at["tp"]) if self.tensor_parallel else (1, 0)
        return {fqn: plan.slice_of(fqn, shape, tp, (math.prod(degrees), index)) for fqn, shape in shapes.items()}

    def groups(self, dims: ParallelDims, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """The ranks that differ only along `axes`, if this is how the ranks are laid out."""
        grid = np.arange(dims.world_size).reshape([getattr(dims, axis) for axis in self.order])
        lines = np.moveaxis(grid, [self.order.index(axis) for axis in axes], range(-len(axes), 0))
        lines = lines.reshape(-1, math.prod(getattr(dims, axis) for axis in axes))
        return sorted(tuple(sorted(map(int, line))) for line in lines)


def _wrong_layout(trial: Trial, broken: dict[str, Result]) -> Diagnosis | None:
    if "shard_contents" not in broken:
        return None
    for layout in _layouts(trial.case.dims):
        if _explains(layout, trial):
            return _name_layout(layout, trial)
    return None


def _layouts(dims: ParallelDims) -> Iterator[Layout]:
    """The plan's own first, then one mistake at a time, then two."""
    axes = [axis for axis in ("dp_replicate", "dp_shard", "tp") if getattr(dims, axis) > 1]
    subsets = [("dp_shard",), ("dp_replicate", "dp_shard"), (), ("dp_replicate",), ("dp_shard", "tp"), ("dp_replicate", "dp_shard", "tp")]
    for tensor_parallel in (True, False):
        for subset in subsets:
            yield Layout(AXES, subset, tensor_parallel)
    for order in itertools.permutations(axes):
        rest = tuple(axis for axis in AXES if axis not in axes)
        yield Layout((*rest, *order), ("dp_shard",), True)


def _explains(layout: Layout, trial: Trial) -> bool:
    for rank, held in trial.holdings.items():
        wanted = layout.slices(trial.case.dims, rank, trial.plan.shapes)
        if any(part is None or not _same(part, wanted[fqn]) for fqn, part in held.items()):
            return False
    return True


def _same(one: Slice, other: Slice) -> bool:
    return one == other or plan.numel(one) == 0 == plan.numel(other)


def _name_layout(layout: Layout, trial: Trial) -> Diagnosis | None:
    dims = trial.case.dims
    ways = math.prod(getattr(dims, axis) for axis in layout.sharded_by)
    asked = "HSDP" if dims.dp_replicate > 1 and dims.dp_shard > 1 else "FSDP" if dims.dp_shard > 1 else "DDP"
    causes = []
    if not layout.tensor_parallel and dims.tp > 1 and "tp" not in layout.sharded_by:
        causes.append(f"TP not applied: every rank of a tp group holds whole weights, asked for tp {dims.tp}")
    if layout.order != AXES:
        shown = [axis for axis in layout.order if getattr(dims, axis) > 1]
        wanted = [axis for axis in AXES if getattr(dims, axis) > 1]
        causes.append(f"axes in the wrong order: ranks are laid out as ({', '.join(shown)}), asked for ({', '.join(wanted)})")
    if ways != dims.dp_shard or layout.sharded_by not in ((), ("dp_shard",)):
        ran = f"{asked} ran as {_strategy(layout, dims)}"
        held = f"parameters are sharded over {ways} ranks" if ways > 1 else "every dp rank holds whole parameters"
        times = f", replicated {dims.dp_replicate} times" if dims.dp_replicate > 1 else ""
        causes.append(f"{ran}: {held}, asked for {dims.dp_shard}{times}")
    return Diagnosis("; ".join(causes), tuple(_layout_lines(trial, layout))) if causes else None


def _strategy(layout: Layout, dims: ParallelDims) -> str:
    """What the data-parallel strategy in force is called."""
    if not layout.sharded_by:
        return "DDP"
    if "tp" in layout.sharded_by:
        return f"FSDP over {' x '.join(layout.sharded_by)}"
    unsharded = [a for a in ("dp_replicate", "dp_shard") if getattr(dims, a) > 1 and a not in layout.sharded_by]
    return "HSDP with the axes exchanged" if unsharded else "FSDP"


def _layout_lines(trial: Trial, layout: Layout) -> Iterator[tuple[str, str]]:
    """Groups that really carried traffic, contents, bytes: expected and observed."""
    dims = trial.case.dims
    used = _groups_in_use(trial)
    for label, axis, ran in (
        ("shard groups", "dp_shard", layout.sharded_by),
        ("replicate groups", "dp_replicate", [a for a in ("dp_replicate", "dp_shard") if a not in layout.sharded_by]),
        ("tp groups", "tp", ["tp"]),
    ):
        if getattr(dims, axis) > 1:
            lines = [group for group in layout.groups(dims, ran) if len(group) > 1 and group in used]
            yield label, f"expected {_groups_text(trial.plan.groups[axis])}   observed {_use_text(trial, axis, lines)}"
    yield from _contents_line(trial)
    yield from _traffic_lines(trial)


def _contents_line(trial: Trial) -> Iterator[tuple[str, str]]:
    wrong = [
        (rank, fqn, part)
        for rank, held in sorted(trial.holdings.items())
        for fqn, part in held.items()
        if part is None or not _same(part, trial.plan.slices[rank][fqn])
    ]
    if wrong:
        rank, fqn, part = wrong[0]
        shape = trial.plan.shapes[fqn]
        seen = plan.slice_text(part, shape) if part is not None else "other bytes"
        count = f"{len({fqn for _, fqn, _ in wrong})} of {len(trial.plan.shapes)} parameters"
        wanted = plan.slice_text(trial.plan.slices[rank][fqn], shape)
        yield "contents", f"{count}: rank {rank} holds of {fqn} {seen}, expected {wanted}"


def _groups_in_use(trial: Trial) -> set[tuple[int, ...]]:
    """Over which ranks tensors moved in forward and backward."""
    return {
        call.ranks
        for evidence in trial.ranks.values()
        for call in evidence.collectives
        if call.phase in ("forward", "backward") and "float" in call.dtype
    }


def _use_text(trial: Trial, axis: str, used: list[tuple[int, ...]]) -> str:
    if used:
        return _groups_text(used)
    wanted = set(trial.plan.groups[axis])
    exist = {group.ranks for evidence in trial.ranks.values() for group in evidence.groups} & wanted
    return "none in use" + (" (the groups exist, no collective ran over them)" if exist == wanted else "")


def _groups_text(groups: Sequence[tuple[int, ...]]) -> str:
    shown = [ranks_text(group) for group in groups]
    return " ".join(shown if len(shown) <= 3 else [*shown[:2], "..", shown[-1]])


def _traffic_lines(trial: Trial) -> Iterator[tuple[str, str]]:
    """Rank 0's planned flows that did not happen as planned, in step 1."""
    seen = observed_traffic(trial.ranks[0], 1)
    for flow in trial.plan.flows[0]:
        moved = seen.get((trial.plan.group_of(0, flow.axis), flow.op, flow.phase), 0)
        if moved != flow.bytes and not flow.optional:
            what = f"{flow.role}: {flow.op} over {flow.axis} in {flow.phase}"
            yield "traffic", f"{what}: expected {bytes_text(flow.bytes)} per step, observed {bytes_text(moved)}"


# ---- data


def _wrong_weights(trial: Trial, broken: dict[str, Result]) -> Diagnosis | None:
    if "initial_weights" not in broken:
        return None
    for axis in reversed(trial.plan.groups):
        same = [group for group in trial.plan.groups[axis] if _start_alike(trial, group)]
        if same and len(same) == len(trial.plan.groups[axis]):
            cause = f"ranks along {axis} start from the same shard: rank {same[0][1]} holds the values of rank {same[0][0]}"
            return Diagnosis(cause, tuple(_contents_line(trial)))
    strangers = [r for r, held in trial.holdings.items() if None in held.values()]
    names = [f for r in strangers[:1] for f, part in trial.holdings[r].items() if part is None]
    if strangers:
        return Diagnosis(f"ranks {ranks_text(strangers)} do not start from the seed weights: {_some(names)}")
    return None


def _start_alike(trial: Trial, group: tuple[int, ...]) -> bool:
    """All members hold the first one's bytes of some parameter that the plan cuts between them, and it is not whole."""
    first = {t.fqn: t.value for t in trial.ranks[group[0]].parameters}
    cut = [f for f in first if trial.plan.slices[group[0]][f] != trial.plan.slices[group[1]][f] and first[f].size]
    others = [{t.fqn: t.value for t in trial.ranks[rank].parameters} for rank in group[1:]]
    alike = [f for f in cut if all(other[f].tobytes() == first[f].tobytes() for other in others)]
    return bool(alike) and all(first[f].shape != trial.plan.shapes[f] for f in alike)


def _wrong_samples(trial: Trial, broken: dict[str, Result]) -> Diagnosis | None:
    if "samples" not in broken:
        return None
    result = broken["samples"]
    fed = shares_of_samples(trial, 1)
    same = [r for r in fed if fed[r] == next(iter(fed.values()))]
    sets = [set(ids) for ids in fed.values()]
    if len(same) > 1:
        cause = f"ranks {ranks_text(same)} were fed the same samples, dp ranks must partition the global batch"
    elif any(a & b for a, b in itertools.combinations(sets, 2)):
        cause = "dp ranks draw overlapping samples: some are fed twice and some to nobody"
    else:
        cause = f"wrong samples: {result.findings[0].where}: {result.findings[0].observed}"
    return Diagnosis(cause, tuple(("samples", f"{f.where}: {f.observed}") for f in result.findings[:2]))


# ---- gradients


def _wrong_gradients(trial: Trial, broken: dict[str, Result]) -> Diagnosis | None:
    if "gradients" not in broken:
        return None
    wrong = _wrong_parameters(trial)
    fqns = list(trial.plan.shapes)
    if not wrong:
        return None
    missing = _missing_reduction(trial)
    if missing:
        return missing
    if all("norm" in fqn for fqn in wrong) and trial.case.dims.tp > 1 and len(wrong) < len(fqns):
        cause = f"gradients of norm weights are not summed over tp: {len(wrong)} parameters wrong, all others right"
        hint = "with sequence parallel each tp rank's norms see their part of the sequence only; the sum over tp is missing"
        return Diagnosis(cause, (("why", hint), *_gradient_lines(trial, wrong)))
    weights = attribution.sample_weights(trial, sorted(trial.ranks))
    if weights is not None and weights.explained:
        return Diagnosis(_name_weights(trial, weights), tuple(_gradient_lines(trial, wrong)))
    where = "all parameters" if len(wrong) == len(fqns) else f"{len(wrong)} of {len(fqns)} parameters ({_some(wrong)})"
    return Diagnosis(f"gradients are wrong in {where}, by no common factor", tuple(_gradient_lines(trial, wrong)))


def _wrong_parameters(trial: Trial) -> list[str]:
    """Parameters whose step-1 gradient is off by more than any rounding, on any rank."""
    found = []
    for fqn, full in trial.reference.steps[0].gradients.items():
        scale = float(np.max(np.abs(full), initial=0.0))
        for rank, evidence in trial.ranks.items():
            part, seen = trial.slice_of(rank, fqn), evidence.steps[0].gradients.get(fqn) if evidence.steps else None
            if part is None or seen is None:
                continue
            expected = take(full, part)
            if seen.shape != expected.shape or not np.max(np.abs(seen - expected), initial=0.0) <= 1e-9 * scale:
                found.append(fqn)
                break
    return found


def _missing_reduction(trial: Trial) -> Diagnosis | None:
    """An axis over which gradients should be reduced and nothing was."""
    for flow in trial.plan.flows[0]:
        key = (trial.plan.group_of(0, flow.axis), flow.op, flow.phase)
        if flow.role == "gradients" and not observed_traffic(trial.ranks[0], 1).get(key):
            cause = f"gradient reduction missing over {flow.axis}: no {flow.op} ran over {_groups_text(trial.plan.groups[flow.axis])}"
            return Diagnosis(cause, tuple(_traffic_lines(trial)))
    return None


def _name_weights(trial: Trial, weights: attribution.Weights) -> str:
    scale = weights.uniform
    if scale is not None:
        return f"gradients are {scale:.6g} times what they should be, in every parameter{_factor_text(trial, scale)}"
    accumulation = trial.case.features.accumulation
    by_microbatch = attribution.by_microbatch(trial, weights) if accumulation > 1 else None
    if by_microbatch is not None:
        lost = [str(i + 1) for i, weight in enumerate(by_microbatch) if abs(weight) < 1e-9]
        shown = ", ".join(f"{round(weight, 9):.6g}" for weight in by_microbatch)
        if lost:
            return f"microbatches {', '.join(lost)} of {accumulation} do not contribute to the gradient (weights {shown})"
        return f"microbatches contribute with weights {shown} to the gradient, each should have 1"
    for per_microbatch, unit in ((False, "rank"), (True, "microbatch")):
        local = attribution.expected_if_averaged_locally(trial, per_microbatch)
        if all(math.isclose(weights.by_sample[i], local.get(i, 0.0), rel_tol=1e-6, abs_tol=1e-9) for i in weights.by_sample):
            return f"the loss is averaged per {unit}: each divides by its own number of valid tokens, not by the global one"
    values = weights.values
    none = int(np.sum(np.abs(values) < 1e-9))
    more = f", {none} of {len(values)} do not count at all" if none else ""
    span = f"{values.min():.4g} to {values.max():.4g}"
    return f"samples count unequally in the gradient: weights {span}{more}, each should have 1"


def _factor_text(trial: Trial, scale: float) -> str:
    """Which group's size, or other number of the case, the factor is."""
    dims = trial.case.dims
    known = {axis: getattr(dims, axis) for axis in AXES if getattr(dims, axis) > 1}
    if dims.dp_replicate > 1 and dims.dp_shard > 1:
        known["dp_replicate x dp_shard"] = dims.dp
    known["accumulation"] = trial.case.features.accumulation
    known["the number of valid tokens"] = trial.reference.steps[0].valid_tokens
    for factor, prefix in ((scale, ""), (1 / scale if scale else 0.0, "1 / ")):
        names = [name for name, value in known.items() if value > 1 and math.isclose(factor, value, rel_tol=1e-6)]
        if names:
            return f": {prefix}{' or '.join(names)} ({'1/' if prefix else ''}{round(factor)})"
    return ""


def _gradient_lines(trial: Trial, wrong: list[str]) -> Iterator[tuple[str, str]]:
    fqn = wrong[0]
    full = trial.reference.steps[0].gradients[fqn]
    for rank in list(trial.ranks)[:2]:
        part = trial.slice_of(rank, fqn)
        seen = trial.ranks[rank].steps[0].gradients.get(fqn)
        if part is not None and seen is not None and seen.shape == take(full, part).shape and seen.size:
            expected = take(full, part)
            ratio = float(np.sum(seen * expected) / np.sum(expected * expected)) if np.any(expected) else math.nan
            yield "gradients", f"rank {rank}, step 1, {fqn}: {ratio:.4g} times the reference's by best fit"


# ---- updates and displays


def _wrong_update(trial: Trial, broken: dict[str, Result]) -> Diagnosis | None:
    if "update" not in broken or not broken["update"].findings:
        return None
    first = broken["update"].findings[0]
    wrong = _ranks_with_wrong_updates(broken["update"])
    clip = clip_coefficient(trial.reference.steps[0].grad_norm, trial.case.training.max_norm)
    unclipped = _not_clipped(trial, clip)
    if unclipped:
        fqns = sorted({fqn for _, fqn in unclipped})
        ranks = sorted({rank for rank, _ in unclipped})
        everywhere = len(ranks) == len(trial.ranks) and len(fqns) == len(trial.plan.shapes)
        what = "gradients are not clipped" if everywhere else f"clipping is not applied to {_some(fqns)} on ranks {ranks_text(ranks)}"
        return Diagnosis(f"{what} (coefficient {clip:.4g})", (("update", f"{first.where}: {first.observed}"),))
    cause = f"gradients are right, the optimizer step is not: {first.where} on ranks {ranks_text(wrong)}"
    return Diagnosis(cause, (("update", f"expected {first.expected}, observed {first.observed}"),))


def _ranks_with_wrong_updates(result: Result) -> list[int]:
    words = [f.where.split(",")[0].split() for f in result.findings]
    return sorted({int(word[1]) for word in words if len(word) == 2 and word[0] == "rank"})


def _not_clipped(trial: Trial, clip: float) -> list[tuple[int, str]]:
    """(rank, fqn) whose step-1 optimizer input was the gradient before clipping."""
    from harness.checks import update

    if clip == 1.0:
        return []
    return [
        (rank, tensor.fqn)
        for rank, evidence in sorted(trial.ranks.items())
        for tensor in evidence.parameters
        if update.explained_by_clip(trial, evidence, tensor, clip=1.0) and not update.explained_by_clip(trial, evidence, tensor, clip=clip)
    ]


def _replicas_drift(trial: Trial, broken: dict[str, Result]) -> Diagnosis | None:
    if "replica_agreement" not in broken:
        return None
    first = broken["replica_agreement"].findings[0]
    return Diagnosis(f"replicas drift apart: {first.where}: {first.observed}")


def _wrong_display(trial: Trial, broken: dict[str, Result]) -> Diagnosis | None:
    shown = {"reported_loss": "the displayed loss", "grad_norm": "the displayed gradient norm"}
    wrong = [name for name in shown if name in broken]
    if not wrong or set(broken) - set(shown):
        return None
    first = broken[wrong[0]].findings[0]
    cause = f"{' and '.join(shown[name] for name in wrong)} is wrong, the training itself is right"
    return Diagnosis(cause, ((wrong[0], f"{first.where}: expected {first.expected}, observed {first.observed}"),))


def _reference_moved(trial: Trial, broken: dict[str, Result]) -> Diagnosis | None:
    if set(broken) != {"golden"}:
        return None
    first = broken["golden"].findings[0]
    cause = "the reference moved, not the trainer: model, data, recipe or torch changed since the golden was accepted"
    return Diagnosis(cause, (("golden", f"{first.where}: {first.expected} -> {first.observed}, bound {first.bound}"),))


def _wrong_groups(trial: Trial, broken: dict[str, Result]) -> Diagnosis | None:
    if not {"traffic", "collective_order", "process_groups", "placements"} & set(broken):
        return None
    name = next(n for n in ("collective_order", "process_groups", "traffic", "placements") if n in broken)
    first = broken[name].findings[0]
    return Diagnosis(f"{name}: {first.where}: expected {first.expected}, observed {first.observed}", tuple(_traffic_lines(trial)))


RULES = (
    _process_died,
    _wrong_layout,
    _wrong_weights,
    _wrong_samples,
    _wrong_gradients,
    _wrong_update,
    _replicas_drift,
    _wrong_display,
    _reference_moved,
    _wrong_groups,
)


# ---- what is common


def _what_the_numbers_say(trial: Trial, results: Sequence[Result]) -> Lines:
    """The laws that pass although the trainer is wrong: what weaker tests would have said."""
    verdicts = {result.check: result for result in results}
    lines: Lines = []
    passing = [n for n in ("loss", "gradients") if n in verdicts and verdicts[n].verdict is Verdict.PASS]
    if passing:
        worst = ", ".join(f"{n}: {verdicts[n].note}" for n in passing)
        blind = ": a loss-curve test passes here" if "loss" in passing else ""
        lines.append((", ".join(passing), f"equal to the reference ({worst}){blind}"))
    if "process_groups" in verdicts and verdicts["process_groups"].verdict is Verdict.PASS:
        lines.append(("groups", "every group of the plan exists: a listing of process groups passes here"))
    return lines


def _plain_summary(broken: dict[str, Result]) -> str:
    name, result = next(iter(broken.items()))
    first = result.findings[0]
    return f"{name}: {first.where}: expected {first.expected}, observed {first.observed}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
