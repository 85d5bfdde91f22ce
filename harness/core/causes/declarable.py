"""What of a failure a trainer may do by choice, as the line that declares it.

For traffic inside of forward and backward a line is printed only where more than planned is moved, over axes of the plan, and
nothing else fails: HSDP that runs as FSDP moves other bytes there, too.
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
from harness.core.judge.traffic import INSIDE_PHASES, axis_of, observed, observed_bytes_outside
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
    """Return the YAML to declare, with what the case declares already, and the check's first finding that is left with it."""
    declarations = tuple(declared)
    if not declarations:
        return ()
    case = with_declarations(trial.case, declarations)
    findings = run_check(check, all_checks()[check].check, trial_of_case(trial, case)).findings
    return (*declaration_lines(trial.case, declarations), *((STILL_FAILING, finding) for finding in findings[:1]))


def declaration_lines(case: Case, declared: Iterable[Declared]) -> Lines:
    """Return the YAML that declares these, with what the case declares already, and where it stands."""
    declaring = with_declarations(case, declared)
    texts = [allowance.declaration(declaring.allow)] if declaring.allow != case.allow else []
    texts += [declared_traits.declaration(declaring.traits)] if declaring.traits != case.traits else []
    return (*((IF_INTENDED, text) for text in texts), ("", PLACE_OF_LINE))


def merge_declarations(case: Case, evidence: Lines) -> Lines:
    """Return the lines with one `allow` and one `traits`: a key cannot be pasted twice."""
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
    """Return the case that declares these in addition. Raise ValueError for traits that exclude each other."""
    allow = list(case.allow)
    traits = dict(case.traits)
    for declaration in declared:
        if isinstance(declaration, Allowance):
            allow.append(declaration)
        else:
            traits[declaration[0]] = declaration[1]
    return replace(case, allow=tuple(allow), traits=declared_traits.traits_for_case(traits))


def trial_of_case(trial: Trial, case: Case) -> Trial:
    """Return the trial of this case, which declares other allowances and traits."""
    if case.traits == trial.case.traits:
        return replace(trial, case=case)
    traits = declared_traits.with_declared(case, trial.traits)
    return assume_case(replace(trial, plan=replace(trial.plan, traits=traits)), case)


def feature_declaration_lines(case: Case) -> Lines:
    """Return the YAML of all features that the case requests, and where it stands."""
    defaults = vars(Features())
    requested = []
    for name, value in vars(case.features).items():
        if value != defaults[name]:
            requested.append(f"{name}: {json.dumps(value)}")
    return ((IF_INTENDED, f"features: {{{', '.join(requested)}}}"), ("", PLACE_OF_LINE))


def allow_graphs(trial: Trial) -> Iterator[Allowance]:
    """Yield the most graphs that a rank compiled, where the case does not request compiled blocks."""
    if not trial.case.features.compile:
        most_graphs = max(evidence.compiler.get("graphs", 0) for evidence in trial.ranks.values())
        yield Allowance("compiled", graphs=most_graphs, reason=REASON_TO_WRITE)


def allow_any_attention(trial: Trial) -> Iterator[Declared]:
    """Yield that attention may be anything, where the adapter says that it is one kernel and no rank called that."""
    called = any(step.activity.attention.get(features.FUSED) for _, step in trial.own_steps())
    if trial.traits.attention and not called:
        yield "attention", None


MATMULS_OF_A_BLOCK = (7, 6, 5, 4)
"""Of a block whose matrices are all apart, with w1 and w3 in one, with wq, wk and wv in one, and with both."""
MOST_CHUNKS = 64


def chunk_traits_of_matmuls(trial: Trial) -> Iterator[Declared]:
    """Yield in how many chunks forward multiplies by the output's weight, where all but that are the matmuls of blocks."""
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
    """Yield the traits of an output layer that forward calls for each chunk of a loss, or that backward calls again."""
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
    """Yield the hooks on saved tensors that neither the case nor the trainer allows, each once, by name."""
    names = set[str]()
    for _, step in trial.own_steps():
        names.update(saved_hooks.foreign_hook_owners(trial, step))
    yield from (Allowance("hooks", name=name, reason=REASON_TO_WRITE) for name in sorted(names))


def allow_matmuls(trial: Trial) -> Iterator[Allowance]:
    """Yield the most that a rank computed in a step outside of training passes."""
    most_matmuls = max(features.all_outside_matmuls(step) for _, step in trial.own_steps())
    yield Allowance("computed", matmuls=most_matmuls, reason=REASON_TO_WRITE)


def allow_gathered(trial: Trial) -> Iterator[Allowance]:
    """Yield the most that a rank has of parameters beside its slices as the optimizer steps."""
    surplus = (
        step.memory.get("parameters", 0) - memory.planned_bytes_by_kind(trial, rank)["parameters"][1]
        for rank, step in trial.own_steps()
    )
    most_bytes = max(surplus)
    if most_bytes > 0:
        yield Allowance("gathered", most_bytes, REASON_TO_WRITE)


def allow_kept_or_copied(trial: Trial, kind: str, ranks: Collection[int]) -> Iterator[Allowance]:
    """Yield the most that one of these ranks keeps ("retained") or copies ("copied") in addition to the plan."""
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
    """Yield each collective outside of passes, and the most that a rank moves by it. The all_reduce of losses and norms
    is left out where there is any other."""
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
    """Return the line for collectives of passes that move more than planned; nothing if anything else fails."""
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
    """Return the bytes that were moved more than planned; 0 for any other finding."""
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
    """Return what to add to an adapter or script that reduces gradients itself. Empty if a wrapper reduces them."""
    if not {"features", "traffic"} & {*broken}:
        return ()
    return tuple(("adapter", text) for text in _remedies(trial))


def _remedies(trial: Trial) -> Iterator[str]:
    """Yield sentences on what to add to the adapter or the script, where gradients are reduced without a wrapper."""
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
    """Return whether gradients are reduced in the first step, over the groups and by the collectives of the plan."""
    evidence = trial.ranks[rank]
    step = trial.first_step
    observed_bytes = observed_bytes_outside(evidence, step) if outside else observed(trial, evidence, step)
    flows = [
        flow for flow in trial.plan.flows_of(rank, step) if flow.role == "gradients" and flow.phase in INSIDE_PHASES
    ]
    return bool(flows) and all(
        observed_bytes.get(_traffic_key(trial, rank, flow, outside), 0) >= flow.bytes for flow in flows
    )


def _traffic_key(trial: Trial, rank: int, flow: Flow, outside: bool) -> tuple[tuple[int, ...], str, str]:
    """Return the key of a flow among observed bytes: ranks of its group, collective, phase."""
    return trial.plan.group_of(rank, flow.axis), flow.op, OUTSIDE if outside else flow.phase
