"""Lines of YAML that declare, for a failure that a trainer may cause by choice, an allowance or a trait.

For traffic inside of forward and backward, a line needs more bytes than planned over axes of the plan, and no other
failing check. HSDP that runs as FSDP moves other bytes there, too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import yaml

from harness.core.case import allowance, declared_traits
from harness.core.case.allowance import OUTSIDE_PHASE, Allowance
from harness.core.case.case import Case
from harness.core.case.features import Features
from harness.core.causes.assume import assume_case
from harness.core.causes.words import Broken
from harness.core.checks import all_checks, features, memory, run_check, traffic
from harness.core.evidence.step import Call
from harness.core.evidence.text import ranks_text
from harness.core.judge import output_layer, saved_hooks
from harness.core.judge.finding import Finding, Limit
from harness.core.judge.places import last_stage_ranks
from harness.core.judge.result import Lines
from harness.core.judge.traffic import INSIDE_PHASES, axis_of, observed_bytes_by_collective, observed_bytes_outside
from harness.core.judge.trial import Trial
from harness.core.plan.traffic.flow import OUTSIDE, Flow

IF_INTENDED = "if intended"
STILL_FAILING = "failing then"
PLACE_OF_LINE = "a key of the case, or of `defaults` in its file"
YAML_KEYS = ("allow:", "traits:")
REASON_TO_WRITE = "WHY"  # the reason, which only the author of the line knows
Declared = Allowance | tuple[str, Any]
"""An allowance, or a trait with its value."""


def declaration_and_next_finding(trial: Trial, check: str, declared: Iterable[Declared]) -> Lines:
    """Return the lines with the YAML that declares these, and the check's first finding that is left with them, if any.

    The YAML repeats what the case declares already. Empty if nothing is to be declared.
    """
    declarations = tuple(declared)
    if not declarations:
        return ()
    case = with_declarations(trial.case, declarations)
    findings = run_check(check, all_checks()[check].check, trial_of_case(trial, case)).findings
    return (*declaration_lines(trial.case, declarations), *((STILL_FAILING, finding) for finding in findings[:1]))


def declaration_lines(case: Case, declared: Iterable[Declared]) -> Lines:
    """Return the lines with the YAML that declares these besides what the case declares, and where it stands."""
    declaring = with_declarations(case, declared)
    texts = [allowance.declaration(declaring.allow)] if declaring.allow != case.allow else []
    texts += [declared_traits.declaration(declaring.traits)] if declaring.traits != case.traits else []
    return (*((IF_INTENDED, text) for text in texts), ("", PLACE_OF_LINE))


def merge_declarations(case: Case, evidence: Lines) -> Lines:
    """Return the lines with one `allow` and one `traits` in place of several: a YAML key cannot be pasted twice.

    The lines are returned unchanged if no key is there twice.
    """
    rows = [row for row in evidence if row[0] == IF_INTENDED and str(row[1]).startswith(YAML_KEYS)]
    if len({str(text).split(":")[0] for _, text in rows}) == len(rows):
        return evidence
    declared: list[Declared] = []
    for _, text in rows:
        for key, value in yaml.safe_load(str(text)).items():
            entries = (Allowance(**entry) for entry in value) if key == "allow" else value.items()
            declared += [
                entry for entry in entries if entry not in declared and entry not in (*case.allow, *case.traits)
            ]
    first = evidence.index(rows[0])
    others = []
    for before, row in itertools.pairwise([("", ""), *evidence]):
        is_where_of_a_row = row == ("", PLACE_OF_LINE) and before in rows
        if row not in rows and not is_where_of_a_row:
            others.append(row)
    return (*others[:first], *declaration_lines(case, declared), *others[first:])


def with_declarations(case: Case, declared: Iterable[Declared]) -> Case:
    """Return the case that declares these in addition. Raises ValueError for traits that exclude each other."""
    allow = list(case.allow)
    traits = dict(case.traits)
    for declaration in declared:
        if isinstance(declaration, Allowance):
            allow.append(declaration)
        else:
            traits[declaration[0]] = declaration[1]
    return replace(case, allow=tuple(allow), traits=declared_traits.traits_for_case(traits))


def trial_of_case(trial: Trial, case: Case) -> Trial:
    """Return the trial with a case that differs in allowances and traits alone.

    If traits differ, its plan is made anew.
    """
    if case.traits == trial.case.traits:
        return replace(trial, case=case)
    traits = declared_traits.with_declared(case, trial.traits)
    return assume_case(replace(trial, plan=replace(trial.plan, traits=traits)), case)


def feature_declaration_lines(case: Case) -> Lines:
    """Return the lines with the YAML of all features that the case requests, and where it stands."""
    defaults = vars(Features())
    requested = []
    for name, value in vars(case.features).items():
        if value != defaults[name]:
            requested.append(f"{name}: {json.dumps(value)}")
    return ((IF_INTENDED, f"features: {{{', '.join(requested)}}}"), ("", PLACE_OF_LINE))


def allow_graphs(trial: Trial) -> Iterator[Allowance]:
    """Yield an allowance for the most graphs that a rank compiled. Nothing if the case requests compiled blocks."""
    if not trial.case.features.compile:
        most_graphs = max(evidence.compiler.get("graphs", 0) for evidence in trial.ranks.values())
        yield Allowance("compiled", graphs=most_graphs, reason=REASON_TO_WRITE)


def allow_any_attention(trial: Trial) -> Iterator[Declared]:
    """Yield ("attention", None), which allows attention of any kind, if the adapter declares a kind and no rank called
    the fused kernel."""
    called = any(step.activity.attention.get(features.FUSED) for _, step in trial.own_steps())
    if trial.traits.attention and not called:
        yield "attention", None


MATMULS_OF_A_BLOCK = (7, 6, 5, 4)
"""Matmuls of a block in forward: all matrices separate, w1 and w3 in one, wq, wk and wv in one, and both."""
MOST_CHUNKS = 64


def chunk_traits_of_matmuls(trial: Trial) -> Iterator[Declared]:
    """Yield ("loss_chunks", number) and ("loss_in_forward", True) if forward applies the output's weight in chunks.

    The number is counted in the first step on one rank of the last stage: its forward matmuls of a pass, less those of its
    blocks. It is the first of MATMULS_OF_A_BLOCK that leaves 2 to MOST_CHUNKS. Nothing if none does, without evidence of the
    last stage, or with LoRA.
    """
    rank = next((rank for rank in last_stage_ranks(trial)), None)
    if rank is None or trial.case.model.lora is not None:
        return
    total = features.matmuls_by_dtype(trial.ranks[rank].steps[0], "forward").total()
    blocks = trial.case.passes * len(features.layers_of_rank(trial, rank))
    for each in MATMULS_OF_A_BLOCK:
        chunks, remainder = divmod(total - each * blocks, trial.case.passes)
        if 1 < chunks <= MOST_CHUNKS and not remainder:
            yield "loss_chunks", chunks
            yield "loss_in_forward", True
            return


def chunk_traits_of_calls(trial: Trial) -> Iterator[Declared]:
    """Yield ("loss_chunks", number) and ("loss_in_forward", True) if forward calls the output layer several times a pass.

    Yield ("recomputes_output", True) if backward calls it. Calls are counted in the first step on one rank of the last
    stage. Nothing without evidence of that stage, and for what the trainer declares already.
    """
    rank = next((rank for rank in last_stage_ranks(trial)), None)
    if rank is None:
        return
    calls = trial.ranks[rank].steps[0].activity.calls
    forward, again = (calls.get(Call(phase, output_layer.OUTPUT), 0) for phase in ("forward", "backward"))
    chunks, remainder = divmod(forward, trial.case.passes)
    if chunks > 1 and not remainder and chunks != trial.traits.loss_chunks:
        yield "loss_chunks", chunks
        yield "loss_in_forward", True
    if again and not trial.traits.recomputes_output:
        yield "recomputes_output", True


def allow_hooks(trial: Trial) -> Iterator[Allowance]:
    """Yield an allowance for each owner of hooks on saved tensors that is not allowed yet, sorted by name."""
    names = set[str]()
    for _, step in trial.own_steps():
        names.update(saved_hooks.foreign_hook_owners(trial, step))
    yield from (Allowance("hooks", name=name, reason=REASON_TO_WRITE) for name in sorted(names))


def allow_matmuls(trial: Trial) -> Iterator[Allowance]:
    """Yield an allowance for the most matmuls that a rank computed in a step outside of training passes."""
    most_matmuls = max(features.all_outside_matmuls(step) for _, step in trial.own_steps())
    yield Allowance("computed", matmuls=most_matmuls, reason=REASON_TO_WRITE)


def allow_gathered(trial: Trial) -> Iterator[Allowance]:
    """Yield an allowance for the most bytes of parameters that a rank has beyond its slices as the optimizer steps.

    Nothing if no rank has more than planned.
    """
    surplus = (
        step.memory.get("parameters", 0) - memory.planned_bytes_by_kind(trial, rank)["parameters"][1]
        for rank, step in trial.own_steps()
    )
    most_bytes = max(surplus)
    if most_bytes > 0:
        yield Allowance("gathered", most_bytes, REASON_TO_WRITE)


def allow_kept_or_copied(trial: Trial, kind: str, ranks: Collection[int]) -> Iterator[Allowance]:
    """Yield an allowance for the most bytes that one of these ranks keeps or copies beyond the plan.

    kind: "retained" or "copied"; nothing is yielded for another one.
    """
    if kind == "retained":
        retained = []
        for rank in ranks:
            bytes_of_copies = sum(copy.bytes for copy in memory.possible_copies(trial, rank))
            retained.append(bytes_of_copies - memory.spare_bytes(trial, rank))
        yield Allowance("kept", max(retained), REASON_TO_WRITE)
    if kind == "copied":
        copied = []
        for rank in ranks:
            for size, step, phase in memory.excessive_copies(trial, rank):
                copied.append(size - memory.copied_by_plan(trial, rank, phase, step))
        yield Allowance("copied", max(copied), REASON_TO_WRITE)


def allow_moved(trial: Trial, finding: Finding) -> Iterator[Allowance]:
    """Yield an allowance for the most bytes of each collective outside of passes, by operator and axis.

    Nothing for a finding that is not of such bytes. The all_reduce of losses and norms is left out where there is any
    other. Collectives over no axis of the plan are left out, but those of all ranks.
    """
    if finding.quantity != traffic.BYTES_MOVED or not isinstance(finding.expected, Limit):
        return
    most_bytes = dict[tuple[str, str], int]()
    world_size = trial.plan.dims.world_size
    for rank, step in trial.own_steps():
        for (ranks, op, _), size in observed_bytes_outside(trial.ranks[rank], step.step).items():
            axis = axis_of(trial, ranks)
            if not axis and len(ranks) == world_size:
                axis = "world"
            if axis and size:  # a barrier moves nothing
                most_bytes[op, axis] = max(most_bytes.get((op, axis), 0), size)
    planned = int(finding.expected.most or 0) if len(most_bytes) == 1 else 0  # which is of the same kind
    unusual = {key: size for key, size in most_bytes.items() if key[0] != "all_reduce"} or most_bytes
    for (op, axis), size in sorted(unusual.items()):
        yield Allowance("moved", size - planned, REASON_TO_WRITE, op=op, phase=OUTSIDE_PHASE, axis=axis)


def allow_moved_inside_lines(trial: Trial, broken: Broken) -> Lines:
    """Return the lines that declare collectives of forward and backward which move more than planned.

    Empty if any other check fails, or if a finding is not of more bytes over an axis of the plan.
    """
    if {*broken} != {"traffic"}:
        return ()
    findings = broken["traffic"].findings
    most_bytes = dict[tuple[str, str, str], int]()
    for finding in findings:
        surplus = _surplus_bytes(finding)
        if surplus <= 0 or not finding.axis or finding.phase not in INSIDE_PHASES:
            return ()
        key = (finding.name, finding.phase, finding.axis)
        most_bytes[key] = max(most_bytes.get(key, 0), surplus)
    allowances = []
    for (op, phase, axis), surplus in sorted(most_bytes.items()):
        allowances.append(Allowance("moved", surplus, REASON_TO_WRITE, op=op, phase=phase, axis=axis))
    return declaration_and_next_finding(trial, "traffic", allowances)


def _surplus_bytes(finding: Finding) -> int:
    """Return the bytes that were moved more than planned, negative if fewer. 0 for a finding that is not of bytes."""
    is_number_of_bytes = (
        isinstance(finding.expected, int) and isinstance(finding.observed, int) and finding.unit == "bytes"
    )
    return finding.observed - finding.expected if is_number_of_bytes else 0  # type: ignore[operator, return-value]


# ---- gradients that a trainer reduces itself, without a wrapper


REDUCE_IN_BACKWARD = (
    "gradients are reduced outside of backward; if functions of the trainer's own do that: "
    "`with harness.adapter.reducing_gradients():` around them; if lines of the training loop do, which no adapter can"
    " wrap: move them, and the division by the number of ranks, into a function of the script first"
)


def adapter_lines(trial: Trial, broken: Broken) -> Lines:
    """Return the lines on what to add to an adapter or script that reduces gradients itself.

    Empty if a wrapper reduces them in backward, or unless `features` or `traffic` fails.
    """
    if not {"features", "traffic"} & {*broken}:
        return ()
    return tuple(("adapter", text) for text in _remedies(trial))


def _remedies(trial: Trial) -> Iterator[str]:
    """Yield sentences on what to add to the adapter or the script.

    There is one if all ranks reduce gradients, but outside of backward. There is one as well if they have no wrapper,
    though the case requests DDP or replicate.
    """
    behind = all(_are_reduced(trial, rank, outside=True) for rank in trial.ranks)
    inside = all(_are_reduced(trial, rank, outside=False) for rank in trial.ranks)
    if behind and not inside:
        yield REDUCE_IN_BACKWARD
    wrapped = any(evidence.structure for evidence in trial.ranks.values())
    if (behind or inside) and not wrapped and trial.case.wrapper in ("ddp", "replicate"):
        axis = trial.plan.replicate_axis
        ranks = ranks_text(trial.plan.group_of(min(trial.ranks), axis))
        call = f'harness.adapter.note_wrapper(model, "{trial.case.wrapper}", replicate_ranks=..)'
        yield f"if it needs no wrapper: `{call}`, the rank's group over {axis}, of rank 0 {ranks}"


def _are_reduced(trial: Trial, rank: int, *, outside: bool) -> bool:
    """Return whether a rank reduces gradients in the first step over the planned groups, by the planned collectives.

    outside: look outside of passes, otherwise inside. False if the plan reduces none.
    """
    evidence = trial.ranks[rank]
    step = trial.first_step
    observed_bytes = (
        observed_bytes_outside(evidence, step) if outside else observed_bytes_by_collective(trial, evidence, step)
    )
    flows = [
        flow for flow in trial.plan.flows_of(rank, step) if flow.role == "gradients" and flow.phase in INSIDE_PHASES
    ]
    return bool(flows) and all(
        observed_bytes.get(_traffic_key(trial, rank, flow, outside), 0) >= flow.bytes for flow in flows
    )


def _traffic_key(trial: Trial, rank: int, flow: Flow, outside: bool) -> tuple[tuple[int, ...], str, str]:
    """Return the key of a flow among observed bytes: (ranks of its group, collective, phase)."""
    return trial.plan.group_of(rank, flow.axis), flow.op, OUTSIDE if outside else flow.phase
