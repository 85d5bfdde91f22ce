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
from harness.core.case.allowance import ELSEWHERE, Allowance
from harness.core.case.case import Case
from harness.core.case.features import Features
from harness.core.causes.assume import another_case
from harness.core.causes.words import Broken
from harness.core.checks import all_checks, features, memory, run_check, traffic
from harness.core.evidence.step import Call
from harness.core.evidence.text import ranks_text
from harness.core.judge import output_layer, saved_hooks
from harness.core.judge.finding import Finding, Limit
from harness.core.judge.places import last_stage_ranks
from harness.core.judge.result import Lines
from harness.core.judge.traffic import INSIDE, axis_of, observed, observed_outside
from harness.core.judge.trial import Trial
from harness.core.plan.traffic.flow import OUTSIDE, Flow

LABEL, LEFT = "if intended", "failing then"
WHERE = "a key of the case, or of `defaults` in its file"
KEYS = ("allow:", "traits:")
WHY = "WHY"  # the reason, which only the author of the line knows
Declared = Allowance | tuple[str, Any]
"""An allowance, or a trait with its value."""


def lines(trial: Trial, check: str, declared: Iterable[Declared]) -> Lines:
    """Return the YAML to declare, with what the case declares already, and the check's first finding that is left with it."""
    found = tuple(declared)
    if not found:
        return ()
    case = with_declarations(trial.case, found)
    left = run_check(check, all_checks()[check].check, as_declared(trial, case)).findings
    return (*declared_lines(trial.case, found), *((LEFT, one) for one in left[:1]))


def declared_lines(case: Case, declared: Iterable[Declared]) -> Lines:
    """Return the YAML that declares these, with what the case declares already, and where it stands."""
    then = with_declarations(case, declared)
    texts = [allowance.declaration(then.allow)] if then.allow != case.allow else []
    texts += [declared_traits.declaration(then.traits)] if then.traits != case.traits else []
    return (*((LABEL, text) for text in texts), ("", WHERE))


def declared_once(case: Case, evidence: Lines) -> Lines:
    """Return the lines with one `allow` and one `traits`: a key cannot be pasted twice."""
    rows = [row for row in evidence if row[0] == LABEL and str(row[1]).startswith(KEYS)]
    if len({str(text).split(":")[0] for _, text in rows}) == len(rows):
        return evidence
    declared: list[Declared] = []
    for key, value in (pair for _, text in rows for pair in yaml.safe_load(str(text)).items()):
        entries = (Allowance(**entry) for entry in value) if key == "allow" else value.items()
        declared += [one for one in entries if one not in declared and one not in (*case.allow, *case.traits)]
    first = evidence.index(rows[0])
    others = [
        row
        for before, row in itertools.pairwise([("", ""), *evidence])
        if row not in rows and not (row == ("", WHERE) and before in rows)
    ]
    return (*others[:first], *declared_lines(case, declared), *others[first:])


def with_declarations(case: Case, declared: Iterable[Declared]) -> Case:
    """Return the case that declares these in addition. Raise ValueError for traits that exclude each other."""
    allow, traits = list(case.allow), dict(case.traits)
    for one in declared:
        if isinstance(one, Allowance):
            allow.append(one)
        else:
            traits[one[0]] = one[1]
    return replace(case, allow=tuple(allow), traits=declared_traits.checked(traits))


def as_declared(trial: Trial, case: Case) -> Trial:
    """Return the trial of this case, which declares other allowances and traits."""
    if case.traits == trial.case.traits:
        return replace(trial, case=case)
    traits = declared_traits.with_declared(case, trial.traits)
    return another_case(replace(trial, plan=replace(trial.plan, traits=traits)), case)


def feature_lines(case: Case) -> Lines:
    """Return the YAML of all features that the case requests, and where it stands."""
    usual = vars(Features())
    requested = (f"{name}: {json.dumps(value)}" for name, value in vars(case.features).items() if value != usual[name])
    return ((LABEL, f"features: {{{', '.join(requested)}}}"), ("", WHERE))


def graphs(trial: Trial) -> Iterator[Allowance]:
    """Yield the most graphs that a rank compiled, where the case does not request compiled blocks."""
    if not trial.case.features.compile:
        yield Allowance(
            "compiled", graphs=max(one.compiler.get("graphs", 0) for one in trial.ranks.values()), reason=WHY
        )


def attention(trial: Trial) -> Iterator[Declared]:
    """Yield that attention may be anything, where the adapter says that it is one kernel and no rank called that."""
    called = any(step.activity.attention.get(features.FUSED) for _, step in trial.own_steps())
    if trial.traits.attention and not called:
        yield "attention", None


MATMULS_OF_A_BLOCK = (7, 6, 5, 4)
"""Of a block whose matrices are all apart, with w1 and w3 in one, with wq, wk and wv in one, and with both."""
MOST_CHUNKS = 64


def projections(trial: Trial) -> Iterator[Declared]:
    """Yield in how many chunks forward multiplies by the output's weight, where all but that are the matmuls of blocks."""
    rank = next((rank for rank in last_stage_ranks(trial)), None)
    if rank is None or trial.case.model.lora is not None:
        return
    total = features.matmuls(trial.ranks[rank].steps[0], "forward").total()
    blocks = trial.case.passes * len(features.layers_of(trial, rank))
    for each in MATMULS_OF_A_BLOCK:
        chunks, rest = divmod(total - each * blocks, trial.case.passes)
        if 1 < chunks <= MOST_CHUNKS and not rest:
            yield "loss_chunks", chunks
            yield "loss_in_forward", True
            return


def output_calls(trial: Trial) -> Iterator[Declared]:
    """Yield the traits of an output layer that forward calls for each chunk of a loss, or that backward calls again."""
    rank = next((rank for rank in last_stage_ranks(trial)), None)
    if rank is None:
        return
    calls = trial.ranks[rank].steps[0].activity.calls
    forward, again = (calls.get(Call(phase, output_layer.OUTPUT), 0) for phase in ("forward", "backward"))
    chunks, rest = divmod(forward, trial.case.passes)
    if chunks > 1 and not rest and chunks != trial.traits.loss_chunks:
        yield "loss_chunks", chunks
        yield "loss_in_forward", True
    if again and not trial.traits.recomputes_output:
        yield "recomputes_output", True


def hooks(trial: Trial) -> Iterator[Allowance]:
    names = {name for _, step in trial.own_steps() for name in saved_hooks.foreign_hooks(trial, step)}
    yield from (Allowance("hooks", name=name, reason=WHY) for name in sorted(names))


def matmuls(trial: Trial) -> Iterator[Allowance]:
    """Yield the most that a rank computed in a step outside of training passes."""
    most = max(features.computed_beside(step) for _, step in trial.own_steps())
    yield Allowance("computed", matmuls=most, reason=WHY)


def gathered(trial: Trial) -> Iterator[Allowance]:
    """Yield the most that a rank has of parameters beside its slices as the optimizer steps."""
    more = (
        step.memory.get("parameters", 0) - memory.planned(trial, rank)["parameters"][1]
        for rank, step in trial.own_steps()
    )
    if (most := max(more)) > 0:
        yield Allowance("gathered", most, WHY)


def held(trial: Trial, kind: str, ranks: Collection[int]) -> Iterator[Allowance]:
    """Yield the most that one of these ranks keeps ("retained") or copies ("copied") in addition to the plan."""
    if kind == "retained":
        kept = (sum(one.bytes for one in memory.copies_kept(trial, r)) - memory.spare(trial, r) for r in ranks)
        yield Allowance("kept", max(kept), WHY)
    if kind == "copied":
        copied = (
            size - memory.most_copied(trial, rank, phase, step) + memory.allowed_bytes(trial, rank, "copied")
            for rank in ranks
            for size, step, phase in memory.copied_too_much(trial, rank)
        )
        yield Allowance("copied", max(copied), WHY)


def moved(trial: Trial, finding: Finding) -> Iterator[Allowance]:
    """Yield each collective outside of passes, and the most that a rank moves by it. The all_reduce of losses and norms
    is left out where there is any other."""
    if finding.quantity != traffic.MOVED or not isinstance(finding.expected, Limit):
        return
    most, world = dict[tuple[str, str], int](), trial.plan.dims.world_size
    for rank, step in trial.own_steps():
        for (ranks, op, _), size in observed_outside(trial.ranks[rank], step.step).items():
            axis = axis_of(trial, ranks) or "world" * (len(ranks) == world)
            if axis and size:  # a barrier moves nothing
                most[op, axis] = max(most.get((op, axis), 0), size)
    planned = int(finding.expected.most or 0) if len(most) == 1 else 0  # which is of the same kind
    unusual = {key: size for key, size in most.items() if key[0] != "all_reduce"} or most
    for (op, axis), size in sorted(unusual.items()):
        yield Allowance("moved", size - planned, WHY, op=op, phase=ELSEWHERE, axis=axis)


def moved_inside(trial: Trial, broken: Broken) -> Lines:
    """Return the line for collectives of passes that move more than planned; nothing if anything else fails."""
    if {*broken} != {"traffic"}:
        return ()
    findings = broken["traffic"].findings
    most = dict[tuple[str, str, str], int]()
    for finding in findings:
        more = _surplus(finding)
        if more <= 0 or not finding.axis or finding.phase not in INSIDE:
            return ()
        key = (finding.name, finding.phase, finding.axis)
        most[key] = max(most.get(key, 0), more)
    allowances = [
        Allowance("moved", more, WHY, op=op, phase=phase, axis=axis) for (op, phase, axis), more in sorted(most.items())
    ]
    return lines(trial, "traffic", allowances)


def _surplus(finding: Finding) -> int:
    """Return the bytes that were moved more than planned; 0 for any other finding."""
    known = isinstance(finding.expected, int) and isinstance(finding.observed, int) and finding.unit == "bytes"
    return finding.observed - finding.expected if known else 0  # type: ignore[operator, return-value]


# ---- gradients that a trainer reduces itself, without a wrapper


IN_BACKWARD = (
    "gradients are reduced outside of backward; if functions of the trainer's own do that: "
    "`with harness.adapter.reducing_gradients():` around them; if lines of the training loop do, which no adapter can"
    " wrap: move them, and the division by the number of ranks, into a function of the script first"
)


def lines_to_write(trial: Trial, broken: Broken) -> Lines:
    """None of a trainer whose wrapper reduces them."""
    if not {"features", "traffic"} & {*broken}:
        return ()
    return tuple(("adapter", text) for text in _remedies(trial))


def _remedies(trial: Trial) -> Iterator[str]:
    behind = all(_are_reduced(trial, rank, outside=True) for rank in trial.ranks)
    inside = all(_are_reduced(trial, rank, outside=False) for rank in trial.ranks)
    if behind and not inside:
        yield IN_BACKWARD
    wrapped = any(evidence.structure for evidence in trial.ranks.values())
    if (behind or inside) and not wrapped and trial.case.wrapper in ("ddp", "replicate"):
        axis = trial.plan.replicate_axis
        ranks = ranks_text(trial.plan.group_of(min(trial.ranks), axis))
        call = f'harness.adapter.note_wrapper(model, "{trial.case.wrapper}", replicate_ranks=..)'
        yield f"if it needs no wrapper: `{call}`, the rank's group over {axis}, of rank 0 {ranks}"


def _are_reduced(trial: Trial, rank: int, *, outside: bool) -> bool:
    """In the first step, over the groups and by the collectives of the plan."""
    evidence, step = trial.ranks[rank], trial.first_step
    seen = observed_outside(evidence, step) if outside else observed(trial, evidence, step)
    flows = [flow for flow in trial.plan.flows_of(rank, step) if flow.role == "gradients" and flow.phase in INSIDE]
    return bool(flows) and all(seen.get(_key(trial, rank, flow, outside), 0) >= flow.bytes for flow in flows)


def _key(trial: Trial, rank: int, flow: Flow, outside: bool) -> tuple[tuple[int, ...], str, str]:
    return trial.plan.group_of(rank, flow.axis), flow.op, OUTSIDE if outside else flow.phase
