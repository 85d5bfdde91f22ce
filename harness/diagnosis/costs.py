"""What is seen where numbers are right: memory, waits, copies, switches, bytes and calls of no plan, repeats, the golden."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from harness.checks import memory, settings, traffic
from harness.checks.traffic import waits
from harness.diagnosis import declarable
from harness.diagnosis.differences import NUMBERS
from harness.diagnosis.hypothesis import Broken, Fact, seen, stated
from harness.diagnosis.words import from_step, of_first, traffic_lines
from harness.evidence.keys import steps_text
from harness.evidence.records import RankEvidence
from harness.evidence.text import bytes_text, ranks_text
from harness.judge.finding import Finding, Value
from harness.judge.result import Cause
from harness.judge.traffic import Key, axis_text, observed, observed_outside, planned
from harness.judge.trial import Trial
from harness.plan.slices import BYTES
from harness.plan.stages import layers_of_stage
from harness.plan.traffic.tensor_parallel import activation_bytes, logits_bytes

# ---- memory


def memory_kept(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """What grows from step to step, what is retained, what is copied within a step; the remedy where that is by choice."""
    if "memory" not in broken:
        return
    ranks, looks = sorted(trial.ranks), (_growing, _retained, _retained_graph, _copied)
    for look in looks:
        found = {rank: text for rank in ranks if (text := look(trial, rank))}
        if found:
            more, kind = next(iter(found.values()))[1], look.__name__.strip("_").replace("_", " ")
            said = of_first(trial, {rank: text for rank, (text, _) in found.items()})
            lines = declarable.lines(declarable.held(trial, kind, found))
            yield stated(broken, "memory", kind, "".join(said) + more, more=lines)


def _growing(trial: Trial, rank: int) -> tuple[str, str] | None:
    if (rate := memory.growth(trial.ranks[rank])) <= trial.plan.table_bytes:
        return None
    kinds = ", ".join(list(memory.grown(trial.ranks[rank]))[:3])
    if unwaited := memory.unwaited_more(trial.ranks[rank]):
        kinds += f"; torch keeps the results of {unwaited} functional collectives that nothing waited for"
    return f"memory held between steps grows by {bytes_text(rate)} a step", f": {kinds}"


def _retained(trial: Trial, rank: int) -> tuple[str, str] | None:
    """Matrices as large as weights are, which are none, nor gradients, nor the optimizer's."""
    if not memory.kept_beside(trial, rank):
        return None
    held = memory.copies_kept(trial, rank)
    size, dtypes = bytes_text(sum(tensor.bytes for tensor in held)), " and ".join(sorted({t.dtype for t in held}))
    kept = f": {_as_large_as(trial, rank)}"
    return f"{size} of {dtypes} are retained in unaccounted tensors", kept


def _as_large_as(trial: Trial, rank: int) -> str:
    """How many of what is kept have the shapes of parameters, whole or as this rank holds them."""
    shapes = [tuple(tensor.shape) for tensor in memory.copies_kept(trial, rank)]
    whole = {*trial.case.model.parameter_shapes().values()}
    own = {tensor.value.shape for tensor in trial.ranks[rank].parameters}
    as_whole, as_slices = (sum(shape in known for shape in shapes) for known in (whole, own))
    count, alike = f"{len(shapes)} tensor{'s' * (len(shapes) != 1)}", max(as_whole, as_slices)
    if not alike:
        return f"{count} with no parameter's shape"
    of = "whole parameters" if as_whole >= as_slices else "that rank's slices"
    return f"{count} with the shapes of {of}" if alike == len(shapes) else f"{count}, {alike} with the shapes of {of}"


def _retained_graph(trial: Trial, rank: int) -> tuple[str, str] | None:
    steps = [step.step for step in trial.ranks[rank].steps if step.graphs_retained]
    if not steps:
        return None
    why = "backward is called with retain_graph=True, and the loss or something else still holds the graph"
    lasts = len(steps) > 1 and steps == [step for step in trial.case.steps if step >= steps[0]]
    when = f"from step {steps[0]} on" if lasts else f"in step {', '.join(map(str, steps))}"
    return "activations of a pass are still there in the next forward pass", f", {when}: {why}"


def _copied(trial: Trial, rank: int) -> tuple[str, str] | None:
    if not (found := memory.copied_too_much(trial, rank)):
        return None
    size, _, phase = found[0]
    steps = steps_text(tuple(sorted(step for most, step, at in found if (most, at) == (size, phase))))
    where = "outside forward and backward" if phase in ("other", "optimizer") else f"in {phase}"
    where = "from before forward on, until they are given up," if phase == memory.BEFORE_FORWARD else where
    return f"{bytes_text(size)} of copies of weights exist at once {where} in {steps}", ""


# ---- switches


def other_settings(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Switches that change numbers are named first."""
    numbers = (*settings.FLOAT32, "default dtype")
    found = sorted(settings.findings(trial) if "settings" in broken else (), key=lambda one: one.name not in numbers)
    if found:
        first, verb = found[0], "are" if found[0].name.endswith("s") else "is"
        alike = [one for one in found if one.name == first.name and one.rank is not None]
        texts = {one.rank: f"{_words(one.observed)} {one.step}" for one in reversed(alike) if one.rank is not None}
        _, ranks, others = of_first(trial, texts)
        where = f"{ranks} {_since(trial, first)}{others}".lstrip()
        requested = _words(first.expected) + f" ({first.note})" * bool(first.note)
        text = f"{first.name} {verb} {_words(first.observed)}, requested {requested} ({where})"
        yield stated(broken, "settings", "another setting", text)


def _words(values: Value) -> str:
    return " and ".join(values) if isinstance(values, tuple) else str(values)


def _since(trial: Trial, finding: Finding) -> str:
    """From a step on, where the switch is as found in each later step of that rank as well; "first" where it is in some."""
    assert finding.rank is not None and finding.step is not None
    evidence = trial.ranks[finding.rank]
    later = [step.settings.get(finding.name, ()) for step in evidence.steps if step.step > finding.step]
    if all(values == finding.observed for values in later):
        return from_step(trial, finding.step)
    usual = finding.expected if isinstance(finding.expected, tuple) else ()
    right = usual if finding.note == settings.ELSEWHERE else settings.allowed(trial, evidence, finding.name)
    return f"{'first ' * any(set(values) - set(right) for values in later)}in step {finding.step}"


# ---- collectives


def ranks_wait(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Collectives that move nothing, where that is all that is wrong with traffic: ranks that wait compute the right thing."""
    waiting = traffic.WITHOUT_DATA
    if "traffic" in broken and all(finding.quantity == waiting for finding in broken["traffic"].findings):
        seen = ((rank, step.step, waits(trial.ranks[rank], step.step)) for rank, step in trial.own_steps())
        rank, step, (key, count) = next((rank, step, min(found.items())) for rank, step, found in seen if found)
        text = f"{count} x {key[1]} over {ranks_text(key[0])} (rank {rank}, step {step})"
        yield stated(broken, "traffic", "ranks wait", f"ranks synchronize in {key[2]} without moving data: {text}")


STRUCTURE = {
    "process_groups": "process groups differ from the plan",
    "traffic": "traffic differs from the plan",
    "placements": "wrappers or placements differ from the plan",
    "memory": "memory held between steps differs from the plan",
}


def of_no_plan(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Numbers are right, the way to them is not: what a check of structure first found, of which no plan is known."""
    for check, text in STRUCTURE.items() if not NUMBERS & set(broken) else ():
        if check in broken:
            first = broken[check].findings[0]
            hint = _mostly(trial, first) + _crossings(trial, check, first)
            lines = (
                (*traffic_lines(trial), *declarable.lines(declarable.moved(trial, first))) if check == "traffic" else ()
            )
            cause = Cause(f"{check} of no plan", text, hint=hint, finding=first)
            yield Fact(cause, (check,), lines, symptom=True)


def _mostly(trial: Trial, finding: Finding) -> str:
    """Of what is moved outside forward and backward, each collective, the most first."""
    if finding.quantity != traffic.MOVED or finding.rank is None or finding.step is None:
        return ""
    whole = sum(map(prod, trial.plan.shapes.values())) * BYTES[trial.case.training.dtype]
    outside = observed_outside(trial.ranks[finding.rank], finding.step)
    texts = (
        f"{bytes_text(moved)} by {op} over {axis_text(trial, ranks)}"
        + ", the size of all parameters or all gradients" * (moved == whole)
        for (ranks, op, _), moved in sorted(outside.items(), key=lambda item: -item[1])
    )
    return "; ".join(texts)


def _crossings(trial: Trial, check: str, finding: Finding) -> str:
    """Of activations over tp: how many more or fewer in each layer."""
    case, rank, step = trial.case, finding.rank, finding.step
    if check != "traffic" or case.dims.tp == 1 or rank is None or step is None:
        return ""
    layers = sum(len(layers_of_stage(case, stage)) for stage in trial.plan.stages[rank])
    crossing, group = activation_bytes(case, case.seq_len(step)), trial.plan.group_of(rank, "tp")
    size = layers * crossing
    seen, wanted = observed(trial, trial.ranks[rank], step), planned(trial, rank, step)
    may_lack = planned(trial, rank, step, optional_only=True)
    more = {key: seen.get(key, 0) - wanted.get(key, 0) for key in sorted({*seen, *wanted}) if key[0] == group}
    odd = {key: count for key, count in more.items() if count and -count != may_lack.get(key)}
    if at_once := _at_once(trial, trial.ranks[rank], step, odd):
        return at_once
    if not size or any(count % size for count in odd.values()):
        return ""
    texts = (f"{abs(n) // size} {'more' if n > 0 else 'fewer'} {op} in {phase}" for (_, op, phase), n in odd.items())
    each = [count // size for count in odd.values()]
    who = {2: "wq, wk and wv", 1: "w1 and w3"}
    hint = f", as where {who[each[0]]} each do so for their own input" if len({*each}) == 1 and each[0] in who else ""
    if case.features.activation_checkpointing != "none" and all(
        key[2] == "backward" and n > 0 for key, n in odd.items()
    ):
        hint = ", as where recomputation issues it again"
    return f"as with {', '.join(texts)} in each layer{hint}" * bool(odd)


def _at_once(trial: Trial, evidence: RankEvidence, step: int, odd: Mapping[Key, int]) -> str:
    """What is moved besides, where that is one call a microbatch, of more than an activation has; whether it is logits."""
    case, passes = trial.case, trial.case.passes
    crossing = activation_bytes(case, case.seq_len(step)) // passes
    calls = [call for call in evidence.collectives if call.step == step]
    for key, count in odd.items():
        sizes = {call.bytes for call in calls if (call.ranks, call.op, call.phase) == key}
        if count > crossing * passes and count % passes == 0 and count // passes in sizes:
            once = f"as by one {key[1]} of {bytes_text(count // passes)} in {key[2]} of each microbatch"
            whole = (
                case.features.loss_parallel
                and key[1:] == ("all_gather", "forward")
                and count == logits_bytes(case, case.seq_len(step))
            )
            hint = ": the logits, whole on every tp rank; if that is meant, request loss_parallel: false"
            return once + hint * whole
    return ""


# ---- replicas, repeats, the golden


def of_two_runs(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """What differs between ranks of one run, or between a run and its repeat. Ranks of a group that issue other collectives:
    gloo pairs what is of equal size, so that numbers may be wrong for it. Replicas: within the bounds of all other checks."""
    if "collective_order" in broken:
        text = "ranks of a group do not issue the same collectives"
        yield seen(broken, "collective_order", "collectives out of order", text)
    if "replica_agreement" in broken and not NUMBERS & set(broken):
        why = "within rounding of the reference, but replicas must be bitwise equal: a difference of one bit grows"
        yield seen(broken, "replica_agreement", "replicas drift", "replicas diverge", more=(("why", why),))
    if "determinism" in broken:
        text = f"two runs of the same case are not bitwise equal{_fed_otherwise(trial)}"
        yield seen(broken, "determinism", "not deterministic", text)


def _fed_otherwise(trial: Trial) -> str:
    """Where the repeat first received other rows, or the same ones in another order: each run by itself may be right."""
    assert trial.repeat is not None
    again = _fed_by_step(trial.repeat.ranks)
    for (step, rank), rows in sorted(_fed_by_step(trial.ranks).items()):
        if rows != (others := again.get((step, rank), [])):
            how = "the same samples in another order" if sorted(rows) == sorted(others) else "other samples"
            return f": the repeat received {how} (rank {rank}, step {step})"
    return ""


def _fed_by_step(ranks: dict[int, RankEvidence]) -> dict[tuple[int, int], list[bytes]]:
    """By step and rank, the rows of tokens in order."""
    return {
        (step.step, rank): [row.tobytes() for m in step.microbatches if m.tokens is not None for row in m.tokens]
        for rank, evidence in sorted(ranks.items())
        for step in evidence.steps
    }


def reference_moved(trial: Trial, broken: Broken) -> Iterator[Fact]:
    if set(broken) == {"golden"}:
        text = "the reference moved, not the trainer: model, data, recipe or torch changed"
        yield stated(broken, "golden", "reference moved", f"{text} since the golden was accepted")
