"""A feature has another value than the one requested; and what its traces alone tell, where no value would leave these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from harness.checks import features
from harness.checks.schedule import planned
from harness.diagnosis import declarable
from harness.diagnosis.assume import another_case, another_recipe, another_reference
from harness.diagnosis.differences import OF_GRADIENTS
from harness.diagnosis.hypothesis import NOT_TESTED, Broken, Fact, Hypothesis, seen, stated, verdict_of
from harness.diagnosis.words import by_rank, of_first, on_ranks, some, traffic_lines
from harness.evidence.records import Wrapper
from harness.evidence.step import StepEvidence
from harness.judge import compiled_code
from harness.judge.finding import Finding
from harness.judge.order import flattened
from harness.judge.result import Cause, Verdict
from harness.judge.trial import Trial
from harness.reference.config import DTYPES
from harness.spec import schedule
from harness.spec.case import Case
from harness.spec.features import FEATURE_CHOICES, LOOPED

CHOICES: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("sequence_parallel", "traffic", (True, False)),
    ("loss_parallel", "traffic", (True, False)),
    ("cp_rotation", "traffic", FEATURE_CHOICES["cp_rotation"]),
    ("cp_load_balance", "samples", (True, False)),
    ("defer_sync", "traffic", (True, False, "all_reduce")),
    ("activation_checkpointing", "features", FEATURE_CHOICES["activation_checkpointing"]),
    ("reduce_dtype", "features", DTYPES),
    ("compute_dtype", "features", DTYPES),
)
"""Of features and the recipe: the check that fails where another value is in force, and the values."""
SPLITS = ("sequence_parallel", "loss_parallel")
"""Features that many trainers leave out for good: it is said how to request that."""


@dataclass(frozen=True)
class Choice:
    """check: the one that fails where this is so. text: how it is said. fitted: how many features differ. line: what requests
    it in a case, where that may be what is meant."""

    check: str
    text: str
    case: Case
    fitted: int = 1
    line: str = ""


def other_features(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Those under which the check that knows the feature's traces holds. Another recipe is another reference too."""
    kinds = sorted({wrapper.kind for evidence in trial.ranks.values() for wrapper in evidence.structure.values()})
    formats = (None, *features.QUANTIZED_PRODUCTS) if trial.case.training.quantize else ()
    choices = (*CHOICES, ("quantize", "features", formats), ("wrapper", "features", tuple(kinds)))
    lines = tuple(traffic_lines(trial)) if "traffic" in broken else ()
    for choice in (*_other_values(trial.case, choices), *_other_schedules(trial)):
        if choice.check in broken and verdict_of(_with(trial, choice.case), choice.check) is Verdict.PASS:
            assume = partial(_with, case=choice.case, whole=True)
            meant = (("if that is meant", f"case: {choice.line}"),) if choice.line else ()
            yield Hypothesis(Cause("another feature", choice.text), assume, choice.fitted, (*lines, *meant))


def _with(trial: Trial, case: Case, *, whole: bool = False) -> Trial:
    """whole: with the reference of the recipe, and the bounds of the one requested where nobody measured others. Traffic and
    traces need neither."""
    assumed = another_case(trial, replace(trial.case, features=case.features, training=case.training))
    assumed = assumed if trial.plan.flat else flattened(assumed)
    if not whole:
        return assumed
    if case.training != trial.case.training:
        assumed = replace(assumed, reference=another_recipe(trial, case.training).reference)
    return replace(assumed, reference=replace(assumed.reference, noise=_noise(trial, assumed)))


def _noise(trial: Trial, assumed: Trial) -> Any:
    noise = trial.reference.noise or (trial.golden.noise if trial.golden else {})
    own = noise.get(trial.traits.noise_key(trial.case))
    return noise if own is None else {trial.traits.noise_key(assumed.case): own, **noise}


def _other_values(case: Case, choices: Iterable[tuple[str, str, tuple[Any, ...]]]) -> Iterator[Choice]:
    recipe, requested = case.training, {**vars(case.features)}
    computes_in = recipe.compute_dtype or recipe.dtype
    requested |= {"wrapper": case.wrapper, "compute_dtype": computes_in, "quantize": recipe.quantize}
    requested |= {"reduce_dtype": case.features.reduce_dtype or computes_in}
    for key, check, values in choices:
        for value in values:
            if value != requested[key] and (other := _changed(case, **{key: value})):
                line = f"features: {{{key}: {str(value).lower()}}}" if key in SPLITS else ""
                yield Choice(check, _in_words(case, key, requested[key], value), other, line=line)


def _changed(case: Case, **values: Any) -> Case | None:
    """None where there is no such case."""
    try:
        if {"compute_dtype", "quantize"} & values.keys():
            return replace(case, training=replace(case.training, **values))
        return replace(case, features=replace(case.features, **values))
    except ValueError:
        return None


def _in_words(case: Case, key: str, requested: Any, value: Any) -> str:
    if key == "defer_sync" and requested is True:
        times, which = f"{case.features.accumulation} times a step", "over dp_shard " * (value == "all_reduce")
        return f"gradients are reduced {which}after every microbatch ({times}), requested once a step"
    if key == "reduce_dtype":
        return f"gradients are reduced in {value}, requested {requested}"
    name = {"activation_checkpointing": "activation checkpointing ", "quantize": ""}.get(key, f"{key} ")
    ran = {"none": "none took place", None: "no matmul ran in that format"}.get(value, f"{value} is observed")
    return f"{name}{requested} is requested, {ran}"


def _other_schedules(trial: Trial) -> Iterator[Choice]:
    """Another schedule, another number of microbatches, or both."""
    case = trial.case
    for number in range(1, case.training.global_batch + 1) if case.dims.pp > 1 else ():
        for name in ("GPipe", "1F1B", *LOOPED):
            chunks = case.stages_per_rank
            if schedule.refusal(name, case.dims.pp, chunks, number) is None:
                ran = replace(case.features, schedule=name, microbatches=number, stages_per_rank=chunks)
                other = replace(trial, case=replace(case, features=ran))
                if all(step.actions == planned(other, rank) for rank, step in trial.own_steps()):
                    texts = _schedule_texts(case, other.case)
                    yield Choice("schedule", "; ".join(texts), other.case, len(texts))


def _schedule_texts(requested: Case, ran: Case) -> list[str]:
    """One for each choice in which they differ."""
    texts, name, number = [], ran.features.schedule, ran.microbatches
    if name != requested.features.schedule:
        texts.append(f"schedule {name} ran, {requested.features.schedule} is requested")
    if number != requested.microbatches:
        went = f"{number} microbatch{'es' * (number != 1)} went through the pipeline"
        texts.append(f"{went}, {requested.microbatches} {'is' if requested.microbatches == 1 else 'are'} requested")
    return texts


def quantized_otherwise(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Other modules in 8 bits than the recipe has; judged by the bounds of the one requested."""
    ran, wanted, recipe = _in_8_bits(trial), {*trial.plan.quantized}, trial.case.training.quantize
    text = _quantization(trial)
    if not ("features" in broken and text and recipe and ran):
        return
    from harness.reference.precision import also_quantized

    altered = also_quantized(recipe, sorted(ran.keys() - wanted), sorted(wanted - ran.keys()))

    def assume(trial: Trial) -> Trial:
        return replace(another_reference(trial, altered=altered), plan=replace(trial.plan, quantized=tuple(ran)))

    yield Hypothesis(Cause("odd traces", text), assume)


# ---- what its traces tell


def odd_traces(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """The first that is seen, in the order in which one follows from another."""
    if "features" not in broken:
        return
    looks: list[Callable[[Trial], str | None]] = [_wrapper, _compile, _quantization, _reduction, _buckets]
    looks += [_checkpointing, partial(_matmuls_again, broken), partial(_attended_again, broken), _compiled_again]
    looks += [_hooks, _beside, _fallback, partial(_attended_too_often, broken)]
    look, text = next(((look, text) for look in looks if (text := look(trial))), (None, ""))
    if look is not None:
        others = ("placements", "shard_contents", "reshard", "traffic") if look is _wrapper else ()
        choices = {_compile: declarable.graphs, _hooks: declarable.hooks, _beside: declarable.matmuls}
        more = declarable.lines(choices[look](trial)) if look in choices else ()
        yield stated(broken, "features", "odd traces", text, *others, more=more)


def _wrapper(trial: Trial) -> str | None:
    """Where the check fails it: around one data rank any wrapper is right."""
    wrong = {rank: str(one.observed) for rank in trial.ranks for one in features.wrapped(trial, rank) if one}
    seen = by_rank(trial, {rank: f"{kind} is observed" for rank, kind in wrong.items()})
    return f"wrapper {trial.case.wrapper or 'none'} is requested, {seen}" if wrong else None


def _first(findings: Iterator[Finding | None]) -> Finding | None:
    return next(filter(None, findings), None)


def _quantization(trial: Trial) -> str | None:
    """Modules that ran in 8 bits and should not, or that should and did not."""
    recipe, wanted, ran = trial.case.training.quantize, {*trial.plan.quantized}, _in_8_bits(trial)
    if trial.case.features.compile or ran.keys() == wanted:
        return None
    if foreign := sorted(ran.keys() - wanted):
        return f"matmuls of {some(foreign)} run in {ran[foreign[0]]}, not requested"
    which = f" of {some(sorted(wanted - ran.keys()))}" if ran else ""
    return f"{recipe} is requested, no matmul{which} ran in that format"


def _in_8_bits(trial: Trial) -> dict[str, str]:
    """The format of each module's matmuls, of those that ran in one."""
    keys = {key for evidence in trial.ranks.values() for step in evidence.steps for key in step.activity.quantized}
    return {key.fqn: key.format for key in sorted(keys)}


def _buckets(trial: Trial) -> str | None:
    """Larger ones than requested, or all gradients at once."""
    found = _first(one for rank in sorted(trial.ranks) for one in features.buckets_in_force(trial, rank))
    if found is None:
        return None
    return f"bucket_mb {trial.case.features.bucket_mb} is requested, up to {found.observed} bytes are reduced at once"


def _reduction(trial: Trial) -> str | None:
    """Gradients added over the data ranks in another dtype."""
    found = _first(one for rank in sorted(trial.ranks) for one in features.reduced(trial, rank))
    if found is None:
        return None
    units = _unlike_others(trial, str(found.expected), "reduce_dtype", lambda unit: unit.reduces_in)
    return f"gradients are reduced in {found.observed}, requested {found.expected}{units}"


def _attended_too_often(broken: Broken, trial: Trial) -> str | None:
    """Attention is done more or less often in forward, and recomputation is right. That follows from a wrong loss or wrong
    samples, and in context parallel from what else is wrong there."""
    alone = trial.case.dims.cp == 1 and broken.keys().isdisjoint(("loss", "samples"))
    for rank, step in trial.own_steps() if alone else ():
        seen, once = step.activity.attention.get(features.FUSED, 0), features.fused_in_forward(trial, rank)
        if seen not in (0, once):
            often = f"{seen / once:.4g} times in forward (rank {rank}, step {step.step})"
            return f"attention is computed {often}, expected once"
    return None


def _fallback(trial: Trial) -> str | None:
    """Fewer fused kernels than layers, and batched matmuls in their place."""
    for rank, step in trial.own_steps() if features.attention_is_fused(trial) else ():
        seen, wanted = step.activity.attention.get(features.FUSED, 0), features.fused_in_forward(trial, rank)
        if seen < wanted and (batched := features.batched_matmuls(step)):
            text = f"{seen} fused kernels in forward, requested {wanted}, and {batched} batched matmuls"
            return f"attention falls back to plain matmuls: {text} (rank {rank}, step {step.step})"
    return None


def _beside(trial: Trial) -> str | None:
    """The first rank and step in which matmuls are neither forward's nor backward's."""
    for rank, step in trial.own_steps():
        if count := features.beside(trial, rank, step):
            blocks = ", some in its blocks," if features.blocks_beside(step) else ""
            text = f"{count} matmuls{blocks} outside forward and backward (rank {rank}, step {step.step})"
            what = "the model runs" if blocks else "matmuls run"
            return f"{what} outside training passes: {text}"
    return None


def _hooks(trial: Trial) -> str | None:
    found: dict[int, set[str]] = {}
    for rank, step in trial.own_steps():
        found.setdefault(rank, set()).update(features.foreign_hooks(trial, step))
    texts = {rank: some(sorted(owners)) for rank, owners in found.items() if owners}
    who = ", not requested".join(of_first(trial, texts)[:2]) + of_first(trial, texts)[2] if texts else ""
    return f"activations saved for backward go through {who}" if texts else None


def _compiled_again(trial: Trial) -> str | None:
    wrong = [
        finding for rank in sorted(trial.ranks) for finding in compiled_code.compiled_again(trial, rank) if finding
    ]
    if not wrong:
        return None
    steps = [f"step {step}" for step in trial.case.steps if step in {finding.step for finding in wrong}]
    return f"blocks are recompiled in {some(steps, 3)} (graphs on rank {wrong[0].rank}: {wrong[0].observed})"


def _compile(trial: Trial) -> str | None:
    requested, ranks = trial.case.features.compile, trial.ranks
    breaks = {key for evidence in ranks.values() for key in evidence.compiler if key.startswith("graph break")}
    graphs = {rank: found for rank, evidence in ranks.items() if (found := evidence.compiler.get("graphs"))}
    most = compiled_code.most_graphs(trial)
    if not requested and (more := [rank for rank in graphs if graphs[rank] > most]):
        allowed = f", {compiled_code.counted_graphs(most)} allowed" if most else ""
        return f"compiled code ran{on_ranks(trial, more)}, compile is not requested{allowed}"
    if breaks and requested:
        return f"compiled blocks break into pieces: {some(sorted(breaks))}"
    if limits := {reason for rank in ranks for reason in compiled_code.gave_up(trial, rank)}:
        return f"torch.compile gave up, blocks run eagerly: {some(sorted(limits))}"
    if requested and (without := ranks.keys() - graphs):
        return f"compile is requested, no block ran compiled{on_ranks(trial, without)}"
    return None


def _checkpointing(trial: Trial) -> str | None:
    """The blocks that each rank called, or called a part of, inside backward, in any step."""
    found, kind = {}, trial.case.features.activation_checkpointing
    for rank, evidence in trial.ranks.items():
        called = {fqn for step in evidence.steps for fqn in features.recomputations(step)}
        found[rank] = {".".join(fqn.split(".")[:2]) for fqn in called if fqn.startswith("layers.")}
    wanted = {rank: {f"layers.{layer}" for layer in features.recomputed_layers(trial.case, rank)} for rank in found}
    wrong = [rank for rank in found if found[rank] != wanted[rank]]
    if not wrong or trial.case.features.compile:
        return None
    seen, meant = ({rank: some(sorted(blocks[rank]), 4) or "none" for rank in wrong} for blocks in (found, wanted))
    text, ranks, others = of_first(trial, {rank: f"{seen[rank]}, requested {meant[rank]}" for rank in wrong})
    return f"activation checkpointing {kind} recomputes the wrong blocks{ranks}: {text}{others}"


def _of(broken: Broken, what: str) -> list[Finding]:
    return [one for one in broken["features"].findings if one.quantity == what]


def _matmuls_again(broken: Broken, trial: Trial) -> str | None:
    """In blocks that are recomputed as requested."""
    kind, found = trial.case.features.activation_checkpointing, _of(broken, features.RECOMPUTED)
    if kind == "none" or not found or _of(broken, features.RECOMPUTATIONS):
        return None
    first = found[0]
    kept = ": all their results are kept" if first.observed == 0 else ""
    which = f"{first.observed} matmuls{_of_parts(trial, first)} in backward (rank {first.rank}, step {first.step})"
    return f"activation checkpointing: {which} are recomputed, expected {first.expected} ({kind} is requested){kept}"


def _step_of(trial: Trial, finding: Finding) -> StepEvidence:
    return next(step for rank, step in trial.own_steps() if (rank, step.step) == (finding.rank, finding.step))


def _of_parts(trial: Trial, finding: Finding) -> str:
    """ ", of attention alone,": where a part of each block was called in backward, and neither the block nor its others."""
    called = features.recomputations(_step_of(trial, finding))
    parts = {fqn.split(".")[2] if fqn.count(".") > 1 else "" for fqn in called if fqn.startswith("layers.")}
    whole = "" in parts or {"attention", "feed_forward"} <= parts
    return "" if whole or not parts else f", of {' and '.join(sorted(parts))} alone,"


def _attended_again(broken: Broken, trial: Trial) -> str | None:
    """Its kernels in backward, where that is all that is odd about recomputation."""
    found = _of(broken, features.ATTENDED_AGAIN)
    if not found or len(found) < len(broken["features"].findings):
        return None
    kind, first = trial.case.features.activation_checkpointing, found[0]
    often = f"{first.observed} times in backward (rank {first.rank}, step {first.step}), expected {first.expected}"
    return f"activation checkpointing: attention is recomputed {often} ({kind} is requested)"


def computed_in_another_dtype(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """What memory, traffic and numbers show then follows from that."""
    found = _of(broken, features.DTYPE) if "features" in broken else []
    if found:
        seen = {one.rank: str(one.observed) + _few(trial, one) for one in reversed(found) if one.rank is not None}
        text = f"matmuls are computed in {''.join(of_first(trial, seen))}, requested {found[0].expected}"
        text += _unlike_others(trial, str(found[0].expected), "param_dtype", lambda unit: unit.casts_to)
        checks = ("reshard", "traffic", "memory", *OF_GRADIENTS)
        yield stated(broken, "features", "another feature", text, *checks, more=NOT_TESTED)


def sent_in_another_dtype(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Between pipeline stages. What is rounded there is not what the reference's bounds are for, so numbers are not tested."""
    if "traffic" not in broken:
        return
    calls = [call for evidence in trial.ranks.values() for call in evidence.collectives if call.phase == "pipeline"]
    wanted = trial.case.training.compute_dtype or trial.case.training.dtype
    seen = {call.dtype for call in calls if call.op in ("send", "recv") and "float" in call.dtype}
    if len(seen) == 1 and wanted not in seen:
        text = f"activations pass between pipeline stages in {seen.pop()}, requested {wanted}"
        yield stated(broken, "traffic", "another feature", text, *OF_GRADIENTS, more=NOT_TESTED)


def _unlike_others(trial: Trial, wanted: str, name: str, of: Callable[[Wrapper], str]) -> str:
    """The units of FSDP2 whose mixed precision policy gives another dtype than others' do, or none."""
    units = next(iter(trial.ranks.values())).structure
    casts = {unit or "the root": of(one) for unit, one in units.items() if one.kind == "fsdp2"}
    odd = [unit for unit, dtype in casts.items() if dtype != wanted]
    if not odd or len(odd) == len(casts):
        return ""
    dtypes = " or ".join(sorted({casts[unit] or "no" for unit in odd}))
    have = f"FSDP unit{'s' * (len(odd) > 1)} {some(odd, 4)} {'have' if len(odd) > 1 else 'has'}"
    return f": {have} {dtypes} {name}, others {wanted}"


def _few(trial: Trial, finding: Finding) -> str:
    """How many of a step's matmuls in forward are not in the dtype requested, where that is not all."""
    found = features.matmuls(_step_of(trial, finding), "forward")
    other, whole = sum(n for dtype, n in found.items() if dtype != finding.expected), sum(found.values())
    if not 0 < other < whole:
        return ""
    return f" ({other} of {whole} in forward in {' and '.join(sorted({*found} - {finding.expected}))})"


def other_actions(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """A pipeline that did what no schedule prescribes."""
    if "schedule" not in broken:
        return
    requested = trial.case.features.schedule
    idle = [rank for rank, evidence in trial.ranks.items() if not evidence.steps[0].actions]
    if idle:
        text = f"no pipeline ran{on_ranks(trial, idle)}, schedule {requested} is requested"
        yield stated(broken, "schedule", "other actions", text)
    else:
        yield seen(broken, "schedule", "other actions", f"the pipeline does not follow schedule {requested}")
