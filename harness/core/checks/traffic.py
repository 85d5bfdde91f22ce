"""In its passes each rank moves exactly the plan's bytes, per group, operator and phase, and outside no more than a bound.

Bytes are counted on unsharded tensors, so bucketing does not matter. Traffic outside forward and backward (losses, norms,
counts) has an upper bound. What ZeRO and Muon gather there, and the gradients of a tied weight that two stages add up, have a
lower bound. Integers inside them have an upper bound, too.
DDP agrees on parameters and buckets in the first two steps, and with find_unused_parameters in every step on which were used.
Before a forward pass DDP may broadcast its module's buffers, exactly these bytes, once for every pass at most.
A trainer may gather parameters by hand before a forward pass, which then gathers so many bytes less.
In passes and in the optimizer no collective moves nothing: such a one only has ranks wait for each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.core.evidence.records import Collective, RankEvidence
from harness.core.evidence.text import bytes_text
from harness.core.judge import after_evaluation
from harness.core.judge.explained import (
    allowances_text,
    allowed_traffic,
    differences_by_plan,
    explained_total_by_what,
    unexplained_total,
)
from harness.core.judge.finding import Finding, Limit
from harness.core.judge.kept_alike import first_differing_step, optimizer_bytes_over_group
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.traffic import (
    INSIDE_PHASES,
    TrafficKey,
    axis_text,
    collective_finding_fields,
    is_traffic,
    observed_bytes_by_collective,
    observed_bytes_outside,
    optional_bytes_by_collective,
    planned_bytes_by_collective,
    planned_bytes_outside_passes,
)
from harness.core.judge.trial import Trial
from harness.core.judge.units_seen import unknown_units_reason
from harness.core.judge.unsettled import partial_sum_bytes
from harness.core.plan.slices import BYTES
from harness.core.plan.traffic.flow import OUTSIDE, TIED_ROLE
from harness.core.plan.traffic.muon import MATRICES_ROLE

STAGE = "structure"
NEEDS = frozenset({"structure", "slices", "flows", "sizes", "members"})
BYTES_MOVED = "bytes moved"
"""Of all collectives outside of forward and backward."""
INTEGERS_MOVED = "integers in forward and backward"
WITHOUT_DATA = "without data"
IN_ANOTHER_DTYPE = "in another dtype"
UPDATED_PARAMETERS = "of updated parameters"
"""Of what ZeRO gathers behind its optimizer."""
QUANTITY_BY_ROLE = {
    MATRICES_ROLE: "of matrices that Muon orthogonalises",
    TIED_ROLE: "of the gradients of a tied weight",
}
"""Of other roles."""


def check(trial: Trial) -> Result:
    """Return the result, with a finding for each collective that moves other bytes than the plan's. NOT APPLICABLE on one rank.

    UNKNOWN if FSDP's units are not known. If the plan is not exact, only the least bytes are judged.
    """
    if trial.plan.dims.world_size == 1:
        return not_applicable("traffic", "one rank moves nothing")
    if reason := unknown_units_reason(trial):
        return Result("traffic", Verdict.UNKNOWN, note=reason)
    if not trial.plan.is_exact:
        return _judge_least_bytes(trial)
    findings, examined, used = [], 0, set[TrafficKey]()
    for rank, evidence in sorted(trial.ranks.items()):
        for step in trial.case.steps:
            wanted = planned_bytes_by_collective(trial, rank, step)
            optional = optional_bytes_by_collective(trial, rank, step)
            observed_bytes = observed_bytes_by_collective(trial, evidence, step)
            inside = sum(optional[key] for key in optional if observed_bytes.get(key, 0) == wanted[key])
            # What may be missing or added is made equal to the plan first: the rest is compared to the byte.
            observed_bytes |= {
                key: wanted[key] for key in optional if observed_bytes.get(key, 0) == wanted[key] - optional[key]
            }
            observed_bytes |= _explained_by_evaluation(
                trial, rank, step, wanted, observed_bytes
            ) | forward_bytes_gathered_ahead(trial, rank, step)
            observed_bytes |= {key: wanted.get(key, 0) for key in _buffer_keys(trial, rank, wanted, observed_bytes)}
            examined += len(wanted) + 1
            allowed = explained_total_by_what(allowed_traffic(trial, rank))
            extra = {key: observed_bytes.get(key, 0) - wanted.get(key, 0) for key in allowed}
            used |= {key for key in extra if extra[key] > 0}
            within = {key for key, limit in allowed.items() if 0 < extra[key] <= limit}
            observed_bytes |= {key: wanted.get(key, 0) for key in within}
            findings += _byte_findings(trial, rank, step, wanted, observed_bytes)
            findings += _outside_findings(trial, rank, step, inside) + _lacking_outside_findings(trial, rank, step)
            findings += _integer_findings(trial, rank, step)
            findings += _wait_findings(trial, evidence, step)
    return verdict_of("traffic", findings, examined, note=_text_of_allowances(trial, used))


def _judge_least_bytes(trial: Trial) -> Result:
    """Return the result, with a finding for each collective that moves less than sharding and replication need.

    The plan of a layout states no passes, frozen parameters or other uses of the groups. Parameters that no optimizer has need
    no sum.
    """
    findings, examined = [], 0
    for rank, evidence in sorted(trial.ranks.items()):
        for step in trial.case.steps:
            wanted, observed_bytes = (
                planned_bytes_by_collective(trial, rank, step),
                observed_bytes_by_collective(trial, evidence, step),
            )
            observed_bytes |= _explained_by_evaluation(
                trial, rank, step, wanted, observed_bytes
            ) | forward_bytes_gathered_ahead(trial, rank, step)
            examined += len(wanted)
            observed_bytes |= {key: count for key, count in wanted.items() if observed_bytes.get(key, 0) > count}
            lacking = _byte_findings(trial, rank, step, wanted, {key: observed_bytes.get(key, 0) for key in wanted})
            findings += [
                finding for shortfall in lacking for finding in _unless_averaged_by_optimizer(trial, rank, shortfall)
            ]
    return verdict_of("traffic", findings, examined, note="at least what the layout needs is moved; more is not judged")


def _unless_averaged_by_optimizer(trial: Trial, rank: int, lacking: Finding) -> list[Finding]:
    """Return nothing for replicas that no sum of gradients joins, if their optimizer's step moves something and leaves them the
    same bytes; else the finding."""
    step, group = lacking.step or 0, lacking.group
    moved = optimizer_bytes_over_group(trial, rank, step, group)
    if lacking.axis != "dp_replicate" or lacking.phase != "backward" or not moved:
        return [lacking]
    differ = first_differing_step(trial, group)
    if differ == 0:
        return []
    comparison = "was not read" if differ is None else f"differs after step {differ}"
    note = f"the optimizer's step moves {bytes_text(moved)} over these ranks, and what they hold {comparison}"
    return [replace(lacking, note="; ".join(filter(None, (lacking.note, note))))]


def _text_of_allowances(trial: Trial, used: set[TrafficKey]) -> str:
    """Return the allowances on bytes that are moved, each marked if it was not used; empty without any.

    Outside of passes any collective of that kind uses one.
    used: the collectives that moved more than planned in passes; those outside are added to it.
    """
    used |= {key for rank, step in trial.own_steps() for key in observed_bytes_outside(trial.ranks[rank], step.step)}
    observed_kinds = {key[1:] for key in used}
    return allowances_text(trial, {"moved": lambda allowance: (allowance.op, allowance.phase) in observed_kinds})


def _explained_by_evaluation(
    trial: Trial, rank: int, step: int, wanted: dict[TrafficKey, int], observed_bytes: dict[TrafficKey, int]
) -> dict[TrafficKey, int]:
    """Return the plan's bytes, of the collectives that differ from it by just what evaluation before this step explains.

    Empty if none does.
    """
    excess = {key: observed_bytes.get(key, 0) - wanted.get(key, 0) for key in wanted | observed_bytes}
    spared = after_evaluation.extra_forward_bytes(trial, rank, step)
    explained = spared if all(excess.get(key, 0) == count for key, count in spared.items()) else {}
    ahead = (key for key in excess if excess[key] in after_evaluation.prefetched_unit_bytes(trial, rank, step, key))
    return {key: wanted.get(key, 0) for key in (*explained, *ahead)}


def _buffer_bytes(trial: Trial, rank: int, kind: str) -> dict[TrafficKey, int]:
    """Return the bytes that DDP broadcasts before a forward pass, by collective. kind: float_buffers or other_buffers."""
    sizes: dict[TrafficKey, int] = defaultdict(int)
    for wrapper in trial.ranks[rank].structure.values():
        sizes[wrapper.replicate_ranks, "broadcast", "forward"] += getattr(wrapper, kind)
    return {key: size for key, size in sizes.items() if size}


def _buffer_keys(
    trial: Trial, rank: int, wanted: dict[TrafficKey, int], observed_bytes: dict[TrafficKey, int]
) -> list[TrafficKey]:
    """Return the collectives that differ from the plan by as much as some of the passes broadcast.

    While an accumulation's gradients wait, DDP leaves that out.
    """
    return [
        key
        for key, size in _buffer_bytes(trial, rank, "float_buffers").items()
        if observed_bytes.get(key, 0) - wanted.get(key, 0) in range(0, (trial.case.passes + 1) * size, size)
    ]


def _outside_findings(trial: Trial, rank: int, step: int, inside: int) -> list[Finding]:
    """Return the finding that a rank moved more unexplained bytes outside passes than planned, less `inside`; empty if not.

    inside: bytes that may move there or in a pass, and moved in a pass.
    """
    observed_bytes = observed_bytes_outside(trial.ranks[rank], step)
    explained = [
        *allowed_traffic(trial, rank),
        *differences_by_plan(partial_sum_bytes(trial, rank, step)),
        *differences_by_plan(bytes_gathered_ahead(trial, rank, step)),
    ]
    moved = unexplained_total(observed_bytes, explained)
    limit = trial.plan.outside_bytes[rank] + sum(planned_bytes_outside_passes(trial, rank, step).values()) - inside
    if moved <= limit:
        return []
    subject: dict[str, Any] = {
        "step": step,
        "kind": "collective",
        "quantity": BYTES_MOVED,
        "phase": OUTSIDE,
        "unit": "bytes",
    }
    return [
        Finding.at(rank, Limit(most=limit), moved, **subject, note=_outside_text(trial, rank, step, observed_bytes))
    ]


def _outside_text(trial: Trial, rank: int, step: int, bytes_by_key: dict[TrafficKey, int]) -> str:
    """Return what the three largest collectives moved there, and in how many calls, the most first."""
    calls = Counter(
        (call.ranks, call.op)
        for call in trial.ranks[rank].collectives
        if call.step == step and call.phase in ("optimizer", "other") and call.bytes
    )
    largest = sorted(bytes_by_key.items(), key=lambda item: -item[1])[:3]
    return "; ".join(
        f"{bytes_text(moved)} by {op} over {axis_text(trial, ranks)}"
        + f" in {calls[ranks, op]} calls" * (calls[ranks, op] > 1)
        for (ranks, op, _), moved in largest
    )


def _lacking_outside_findings(trial: Trial, rank: int, step: int) -> list[Finding]:
    """Return a finding for each planned flow outside of passes that moved too little.

    These are what ZeRO gathers behind its optimizer, what Muon gathers in its own, and gradients of a tied weight over two
    stages.
    They are moved there, whatever else is.
    """
    wanted = planned_bytes_outside_passes(trial, rank, step)
    observed_bytes = observed_bytes_outside(trial.ranks[rank], step, pairs={key[0] for key, _ in wanted})
    return [
        Finding.at(
            rank,
            Limit(least=lower_bound),
            observed_bytes.get(key, 0),
            step=step,
            **collective_finding_fields(trial, key) | {"quantity": QUANTITY_BY_ROLE.get(role, UPDATED_PARAMETERS)},
        )
        for (key, role), lower_bound in wanted.items()
        if observed_bytes.get(key, 0) < lower_bound
    ]


def _integer_findings(trial: Trial, rank: int, step: int) -> list[Finding]:
    """Return a finding if a rank moved more integers in passes than the plan and allowances explain; else nothing.

    Truth values and bytes are integers, too. Sends and receives are left out: stages of a pipeline tell each other their
    shapes.
    """
    observed_bytes = Counter[TrafficKey]()
    for call in trial.ranks[rank].collectives:
        is_in_pass = call.step == step and call.phase in INSIDE_PHASES and len(call.ranks) > 1
        if is_in_pass and "float" not in call.dtype and call.op not in ("send", "recv"):
            observed_bytes[call.ranks, call.op, call.phase] += call.bytes
    moved = unexplained_total(observed_bytes, allowed_traffic(trial, rank))
    finds_unused = any(wrapper.find_unused_parameters for wrapper in trial.ranks[rank].structure.values())
    later = trial.plan.used_bytes if finds_unused else 0
    limit = trial.plan.integer_bytes if step <= trial.first_step + 1 else later
    limit += trial.case.passes * sum(_buffer_bytes(trial, rank, "other_buffers").values())
    if moved <= limit:
        return []
    subject: dict[str, Any] = {"step": step, "quantity": INTEGERS_MOVED, "kind": "collective", "unit": "bytes"}
    note = calls_text(trial, rank, step, list(observed_bytes), integers=True)
    return [Finding.at(rank, Limit(most=limit) if limit else 0, moved, **subject, note=note)]


def waits_by_collective(evidence: RankEvidence, step: int) -> Counter[TrafficKey]:
    """Return the number of a step's collectives that move nothing, in which ranks only wait for each other, by collective.

    Those in passes and in the optimizer are counted. Waits between passes are usual, and not judged.
    """
    return Counter(
        (call.ranks, call.op, call.phase)
        for call in evidence.collectives
        if call.step == step and call.op in ("barrier", "all_reduce", "broadcast") and not call.bytes
        if call.phase in (*INSIDE_PHASES, "optimizer") and len(call.ranks) > 1
    )


def _wait_findings(trial: Trial, evidence: RankEvidence, step: int) -> list[Finding]:
    """Return a finding for each collective in passes or the optimizer that moves nothing, and only has ranks wait.

    Nothing of ZeRO-3 in its first two steps: what its ranks compare may be an empty list.
    """
    if trial.case.wrapper == "zero3" and step <= trial.first_step + 1:
        return []
    return [
        Finding.at(
            evidence.rank,
            0,
            count,
            step=step,
            **collective_finding_fields(trial, key) | {"quantity": WITHOUT_DATA, "unit": ""},
        )
        for key, count in sorted(waits_by_collective(evidence, step).items())
    ]


def _byte_findings(
    trial: Trial, rank: int, step: int, wanted: dict[TrafficKey, int], observed_bytes: dict[TrafficKey, int]
) -> list[Finding]:
    """Return a finding for each collective that moved other bytes than wanted, ordered by phase, operator and ranks."""
    findings = []
    for key in sorted(
        set(wanted) | set(observed_bytes), key=lambda order_key: (order_key[2], order_key[1], order_key[0])
    ):
        expected, moved = wanted.get(key, 0), observed_bytes.get(key, 0)
        if expected != moved:
            subject = collective_finding_fields(trial, key)
            calls_note = calls_text(trial, rank, step, [key]) if moved > expected else ""
            if dtype_note := dtypes_text(trial, rank, step, key, expected, moved):
                subject["quantity"] = IN_ANOTHER_DTYPE
            subject["note"] = "; ".join(filter(None, (dtype_note, calls_note, subject["note"])))
            findings.append(Finding.at(rank, expected, moved, step=step, **subject))
    return findings


def calls_text(trial: Trial, rank: int, step: int, keys: Sequence[TrafficKey], *, integers: bool = False) -> str:
    """Return in how many calls a rank moved what it moved by these collectives, the largest first: "4 all_gather over dp_shard
    of 32.77 kB each". integers: of what is no floating-point number alone."""
    sizes: dict[TrafficKey, list[int]] = defaultdict(list)
    for call in trial.ranks[rank].collectives:
        key = (call.ranks, call.op, call.phase)
        if call.step == step and key in keys and call.bytes and not (integers and "float" in call.dtype):
            sizes[key].append(call.bytes)
    texts = (
        f"{len(call_sizes)} {key[1]} over {axis_text(trial, key[0])} of {bytes_text(max(call_sizes))}"
        f"{' each' * (len({*call_sizes}) == 1 < len(call_sizes))}"
        f"{' at most' * (len({*call_sizes}) > 1)}"
        for key, call_sizes in sorted(sizes.items(), key=lambda item: -sum(item[1]))
    )
    return "; ".join(texts)


def dtypes_text(trial: Trial, rank: int, step: int, key: TrafficKey, expected: int, moved: int) -> str:
    """Return in which dtypes a collective's elements moved, if in one dtype of the recipe they would be the expected bytes.

    Empty otherwise.
    """
    elements = Counter[str]()
    for call in trial.ranks[rank].collectives:
        if call.step == step and is_traffic(call) and (call.ranks, call.op, call.phase) == key:
            elements[call.dtype] += call.bytes // BYTES.get(call.dtype, 1)
    recipe = (trial.case.training.dtype, trial.case.training.compute_dtype, trial.case.features.reduce_dtype)
    matching_dtype = next((dtype for dtype in recipe if dtype and elements.total() * BYTES[dtype] == expected), "")
    if not matching_dtype or moved == expected or not elements.keys() <= BYTES.keys():
        return ""
    observed_text = " and ".join(f"{count} elements of {dtype}" for dtype, count in sorted(elements.items()))
    return f"{observed_text}; expected {'all' if len(elements) > 1 else 'as many'} of {matching_dtype}"


# ---- parameters that are gathered by hand before the forward pass that would: FSDP2's `unshard`


GATHER = "all_gather"


def gathers_before_passes(trial: Trial, rank: int, step: int) -> tuple[Collective, ...]:
    """Return the last calls before forward passes of a step that gathered, to the byte, what these passes lack.

    Empty if no number of last calls does: earlier ones may have been made for another reason.
    """
    if trial.case.wrapper != "fsdp2":
        return ()  # ZeRO's gathers have their place in the plan
    key = _forward_gather_key(trial, rank)
    wanted = planned_bytes_by_collective(trial, rank, step).get(key, 0)
    lacking = wanted - observed_bytes_by_collective(trial, trial.ranks[rank], step).get(key, 0)
    calls = _gathers_between_passes(trial.ranks[rank].collectives, key[0])[step] if lacking > 0 else []
    for count in range(1, len(calls) + 1):
        if sum(call.bytes for call in calls[-count:]) == lacking:
            return tuple(calls[-count:])
    return ()


def forward_bytes_gathered_ahead(trial: Trial, rank: int, step: int) -> dict[TrafficKey, int]:
    """Return the plan's bytes of the gathers in forward, if a part of them came before it; else nothing."""
    key = _forward_gather_key(trial, rank)
    return (
        {key: planned_bytes_by_collective(trial, rank, step)[key]} if gathers_before_passes(trial, rank, step) else {}
    )


def bytes_gathered_ahead(trial: Trial, rank: int, step: int) -> dict[TrafficKey, int]:
    """Return the bytes that a step moves outside of its passes for forward passes that come later, by collective."""
    moved = Counter[TrafficKey]()
    for later in trial.case.steps:
        for call in gathers_before_passes(trial, rank, later):
            if call.step == step:
                moved[call.ranks, call.op, OUTSIDE] += call.bytes
    return dict(moved)


def _forward_gather_key(trial: Trial, rank: int) -> TrafficKey:
    return trial.plan.peers(rank, trial.plan.shard_axis), GATHER, "forward"


def _gathers_between_passes(calls: Sequence[Collective], ranks: tuple[int, ...]) -> dict[int, list[Collective]]:
    """Return, by step, the gathers over these ranks that come between two passes, or before the first one."""
    gathers_by_step, waiting = defaultdict[int, list[Collective]](list), list[Collective]()
    for call in calls:
        if call.phase in INSIDE_PHASES:
            gathers_by_step[call.step] += waiting
            waiting = []
        elif call.phase == "optimizer":
            waiting = []  # weights from before the step
        elif (call.phase, call.op, call.ranks) == ("other", GATHER, ranks) and "float" in call.dtype:
            waiting.append(call)
    return gathers_by_step
