"""The trial of a recorded job, of which a layout alone is declared: for the same checks, as far as they need no more.

Shapes and units of the plan are those that were observed, and precision is that of the collectives. There is no reference.
If a recording does not show what a check needs, the check does not judge it, and says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.measured import MeasuredTraits
from harness.core.case.traits import TrainerTraits
from harness.core.evidence.provided import WORDS, Provided
from harness.core.evidence.recorded_run import RecordedRun
from harness.core.evidence.recording import RankRecord
from harness.core.evidence.records import Collective, RankEvidence
from harness.core.evidence.summary import Summary, idle_steps, summary_of
from harness.core.evidence.text import names_text
from harness.core.evidence.unplaced import unplaced_groups_reason
from harness.core.judge.local_training import local_training_means
from harness.core.judge.measured import claimed_cut_dims, claimed_units
from harness.core.judge.observed import families_of_replicas
from harness.core.judge.traffic import INSIDE_PHASES
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.core.plan.plan import Plan, without_slices
from harness.core.plan.slices import BYTES
from harness.recording.judged.recorded_ends import exits_of, why_exits_unknown
from harness.recording.judged.stored_recording import Recording, recorder_failure_text, unrecorded_model_text
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.record import ReferenceRun

NO_REFERENCE = ReferenceRun({}, (), (), (), np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64))
FREED = "parameters have no elements before the first pass, as under ZeRO-3: where they lie was not seen"
NO_OPTIMIZER = "no step was seen: a step ends where a torch.optim.Optimizer has stepped, and none did"
CUT = "{} degree above 1: what a rank holds of a parameter is not derived"


@dataclass(frozen=True)
class ObservedModel(ModelConfig):
    """A model of which only the parameters are known, by the names and whole shapes that ranks have."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(fqn, shape of the whole parameter), of each one."""

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self.shapes)


class LayoutCase(Case):
    """A case of which only the layout is requested. Model, dtypes and wrapper are those that were observed."""

    is_complete = False


def trial_of(
    records: Mapping[int, RankRecord],
    dims: ParallelDims,
    directory: str,
    world: int,
    *,
    recording: Recording | None = None,
    like: Mapping[int, int] | None = None,
) -> Trial:
    """Return the trial of a recorded job: the case and plan of this layout, and what ranks left, up to the last
    complete step.

    records: of all ranks that left one, or of representatives. recording: that of all ranks; by default it is made of
    the records. like: rank -> the one that was read instead. world: ranks of the job, which may be more or fewer than
    the layout's.
    """
    like = {rank: rank for rank in records} if like is None else like
    steps = _complete_steps(records.values())
    ranks = {rank: _evidence_of_steps(record.evidence, steps) for rank, record in records.items()}
    heard = recording or _recording_of(records, directory)
    exits = exits_of(heard, world)
    case = _case_of_job(dims, ranks, Counter(like.values()), max(steps, default=1))
    units = {rank: claimed_units(evidence) for rank, evidence in ranks.items()}
    units_of_all = {rank: units[representative] for rank, representative in sorted(like.items())}
    measured = MeasuredTraits(units_of_all, cut_dims=claimed_cut_dims(ranks.values()))
    plan = _plan_without_ignored(case, TrainerTraits(measured=measured), _ignored_parameters(ranks.values()))
    if dims.tp * dims.pp > 1 or plan.flat:
        plan = without_slices(plan)
    provided = _provided_evidence(case, ranks, records, heard)
    has_size_of_layout = {evidence.world_size for evidence in ranks.values()} == {dims.world_size}
    if has_size_of_layout and (why := why_exits_unknown(exits, heard)):
        provided = provided.lacking_words(("ends",), why, unknown=True)
    run = RecordedRun(
        directory,
        world,
        exits,
        ranks,
        provided=provided,
        chosen=heard.chosen,
        representatives=like,
        summaries=dict(sorted(heard.summaries.items())),
    )
    return Trial(case, plan, run, NO_REFERENCE)


def _provided_evidence(
    case: Case, ranks: Mapping[int, RankEvidence], records: Mapping[int, RankRecord], recording: Recording
) -> Provided:
    """Return which kinds of evidence a recording provides to checks, with reasons for those that it lacks or has in
    part only.

    How the job ended is judged elsewhere.
    """
    provided = recording.provides
    summaries = recording.summaries.values()
    if recording.world != case.dims.world_size:
        why = f"the job has {recording.world} ranks, not those of the layout"
        provided = provided.lacking_words(WORDS.keys() - {"ends"}, why)
    for word, why in (
        ("slices", _why_no_slices(case, ranks)),
        ("flows", _why_no_flows(records) or _local_training_text(summaries)),
        ("claims", _why_no_claims(case, ranks)),
    ):
        if why:
            provided = provided.lacking_words((word,), why)
    if why := _why_claims_unseen(case, ranks, records):
        provided = provided.lacking_words(("claims",), why, unknown=True)
    if records and all(_has_stepped_nothing(record) for record in records.values()):
        provided = provided.without_complete_evidence(NO_OPTIMIZER)
        provided = provided.lacking_words(("contents",), NO_OPTIMIZER, unknown=True)
    own_groups = {rank: summary.groups.own for rank, summary in recording.summaries.items()}
    if why := unplaced_groups_reason(own_groups):
        provided = provided.lacking_words(("members",), why, unknown=True)
    if partial := unrecorded_model_text(summaries):
        provided = provided.lacking_words(("sizes",), partial, unknown=True)
        provided = provided.with_doubt_about(("claims", "slices", "contents"), partial)
    if failed := recorder_failure_text(summaries):
        provided = provided.without_complete_evidence(failed)
        provided = provided.with_doubt_about(provided.singly, failed)
    return provided


def _has_stepped_nothing(record: RankRecord) -> bool:
    """Return whether a rank trained to its end, and the recorder saw the end of no step."""
    return record.ended == "ok" and not record.evidence.steps and not record.steps_seen


def _plan_without_ignored(case: Case, traits: TrainerTraits, ignored: set[str]) -> Plan:
    """Return the plan of a case. Its flows are without parameters that wrappers ignore, for these are not moved."""
    plan = make_plan(case, traits)
    if not ignored:
        return plan
    shapes = tuple((fqn, shape) for fqn, shape in case.model.parameter_shapes().items() if fqn not in ignored)
    moved = make_plan(replace(case, model=ObservedModel(name="recorded", n_layers=0, shapes=shapes)), traits)
    return replace(plan, flows=moved.flows, even_flows=moved.even_flows, last_flows=moved.last_flows)


def _ignored_parameters(ranks: Iterable[RankEvidence]) -> set[str]:
    """Return the fqns of all parameters that a wrapper of some rank ignores."""
    fqns: set[str] = set()
    for evidence in ranks:
        for wrapper in evidence.structure.values():
            fqns.update(wrapper.ignored)
    return fqns


def _recording_of(records: Mapping[int, RankRecord], directory: str) -> Recording:
    last = {rank: record.last for rank, record in records.items() if record.last and not record.ended}
    return Recording(Path(directory), {rank: summary_of(record) for rank, record in records.items()}, last=last)


def _complete_steps(records: Iterable[RankRecord]) -> list[int]:
    """Return the steps from 1 on that every rank recorded to their end, up to the first gap; empty if there are no records."""
    seen = [{*record.ended_steps} for record in records]
    common = set.intersection(*seen) if seen else set()
    return [step for step in sorted(common) if set(range(1, step + 1)) <= common]


def _evidence_of_steps(evidence: RankEvidence, steps: list[int]) -> RankEvidence:
    """Return a rank's evidence of these steps alone. Collectives before the first step stay."""
    calls = tuple(call for call in evidence.collectives if call.step in steps or call.step == 0)
    return replace(evidence, steps=tuple(s for s in evidence.steps if s.step in steps), collectives=calls)


# ---- what is requested, as far as a layout says it


def _case_of_job(dims: ParallelDims, ranks: Mapping[int, RankEvidence], many: Mapping[int, int], steps: int) -> Case:
    """Return the case of a recorded job: shapes, dtypes, wrapper and reduction dtype are the observed ones, and dims
    the declared ones.

    many: rank -> number of ranks that it represents. steps: number of complete steps.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for evidence in ranks.values():
        shapes |= {tensor.fqn: tensor.global_shape for tensor in evidence.parameters}
    model = ObservedModel(name="recorded", n_layers=0, shapes=tuple(shapes.items()))
    stored = _parameter_dtype(ranks.values())
    gathered = _main_dtype_of(ranks, many, "all_gather")
    reduced = _main_dtype_of(ranks, many, "reduce_scatter") or _main_dtype_of(ranks, many, "all_reduce")
    training = TrainingConfig(
        steps=steps, dtype=stored or "float32", compute_dtype=gathered if gathered != stored else None
    )
    features = Features(wrapper=_usable_wrapper_kind(dims, ranks.values()), reduce_dtype=reduced)
    return LayoutCase("recorded", "a recorded job", dims=dims, model=model, training=training, features=features)


def _parameter_dtype(ranks: Iterable[RankEvidence]) -> str | None:
    """Return the dtype of all parameters; None if they have several, or one that the plan does not support."""
    dtypes: set[str] = set()
    for evidence in ranks:
        dtypes.update(tensor.dtype for tensor in evidence.parameters)
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    return dtype if dtype in BYTES else None


def _main_dtype_of(ranks: Mapping[int, RankEvidence], many: Mapping[int, int], op: str) -> str | None:
    """Return the dtype in which most bytes of this collective moved in forward and backward. None if none moved.

    many: number of ranks that each one represents.
    """
    moved: Counter[str] = Counter()
    for rank, evidence in ranks.items():
        for call in evidence.collectives:
            if call.op == op and call.phase in ("forward", "backward") and call.dtype in BYTES:
                moved[call.dtype] += call.bytes * many[rank]
    return max(moved, key=moved.__getitem__) if moved else None


def _wrapper_kinds(ranks: Iterable[RankEvidence]) -> set[str]:
    """Return the kinds of wrappers that any rank has, such as {"fsdp2"}; empty if none has a wrapper."""
    kinds: set[str] = set()
    for evidence in ranks:
        kinds.update(wrapper.kind for wrapper in evidence.structure.values())
    return kinds


def _usable_wrapper_kind(dims: ParallelDims, ranks: Iterable[RankEvidence]) -> str | None:
    """Return the kind of wrapper that was seen, if it can do what is requested. None if none was seen that can.

    A layout of cp alone says no more than that tokens are cut. If no wrapper claims to shard parameters over it, each
    rank may have them whole, as under DDP.
    """
    ranks = list(ranks)
    kinds = _wrapper_kinds(ranks)
    able = ("fsdp2", "fsdp1") if dims.dp_shard * dims.cp > 1 else ("ddp", "replicate", "fsdp1")
    if dims.dp_shard > 1 or dims.cp == 1:
        return next((kind for kind in able if kind in kinds), None)
    unclaimed = "ddp" if not kinds and not _has_dtensors(ranks) else None
    return next((kind for kind in (*able, "ddp", "replicate") if kind in kinds), unclaimed)


def _why_no_slices(case: Case, ranks: Mapping[int, RankEvidence]) -> str:
    """Return why it is not derived what a rank holds of a parameter; empty if it is."""
    kinds = _wrapper_kinds(ranks.values())
    if not any(evidence.parameters for evidence in ranks.values()):
        return "no rank recorded any parameter"
    if case.dims.tp * case.dims.pp > 1:
        return CUT.format("tp or pp")
    if _parameter_dtype(ranks.values()) is None:
        return "parameters have several types, or one whose bytes are not derived"
    if "fsdp1" in kinds:
        return "FSDP1 cuts vectors of many parameters, which are not derived"
    if case.dims.dp * case.dims.cp > 1 and not kinds:
        return "no data-parallel wrapper of torch's was seen"
    if own := _own_parameter(ranks.values()):
        return f"ranks have parameters of their own ({own}), which their wrappers ignore"
    return f"several kinds of wrappers: {', '.join(sorted(kinds))}" if len(kinds) > 1 else ""


def _why_no_claims(case: Case, ranks: Mapping[int, RankEvidence]) -> str:
    """Return why nothing says where parameters lie; empty if the layout, a wrapper, a DTensor or an empty parameter
    says so."""
    claimed = (
        case.shards > 1
        or _wrapper_kinds(ranks.values())
        or _has_dtensors(ranks.values())
        or _has_freed_parameters(ranks.values())
    )
    return "" if claimed else "nothing says where it lies: plain tensors, and no wrapper of torch's was seen"


def _own_parameter(ranks: Iterable[RankEvidence]) -> str:
    """Return the first name of the parameters that only some ranks have, if wrappers ignore all of these. Empty if not.

    Experts of a rank may have such names of their own.
    """
    ranks = list(ranks)
    counts = Counter[str]()
    for evidence in ranks:
        counts.update(tensor.fqn for tensor in evidence.parameters)
    own = {fqn for fqn, count in counts.items() if count < len(ranks)}
    return min(own) if own and own <= _ignored_parameters(ranks) else ""


def _why_claims_unseen(case: Case, ranks: Mapping[int, RankEvidence], records: Mapping[int, RankRecord]) -> str:
    """Return why it was not seen where parameters lie; empty if it was, or there is nothing to see."""
    if _wrapper_kinds(ranks.values()) or _has_dtensors(ranks.values()):
        return ""
    if _has_freed_parameters(ranks.values()):
        return FREED
    if case.shards == 1 or not _steps_on_foreign_tensors(records):
        return ""
    return "what is stepped on is no parameter of the model, as under ZeRO: where it lies was not seen"


def _has_freed_parameters(ranks: Iterable[RankEvidence]) -> bool:
    """Return whether some rank has parameters, and all of them are empty before its first pass.

    Replicas have them whole, and shards a part.
    """
    for evidence in ranks:
        sizes = [tensor.value.size for tensor in evidence.parameters]
        if sizes and not any(sizes):
            return True
    return False


def _steps_on_foreign_tensors(records: Mapping[int, RankRecord]) -> bool:
    """Return whether optimizers step on other tensors than the model's.

    True if in no recorded step an optimizer of any rank has, or found a gradient in, a parameter of the model. False if
    no step is on record.
    """
    has_steps = False
    for record in records.values():
        fqns = {tensor.fqn for tensor in record.evidence.parameters}
        for step in record.steps:
            if not step.step:
                continue
            has_steps = True
            if record.stepped or not {*step.ungraded} >= fqns:
                return False
    return has_steps


def _has_dtensors(ranks: Iterable[RankEvidence]) -> bool:
    """Return whether any rank has a parameter on a device mesh."""
    return any(map(_is_on_mesh, ranks))


def _is_on_mesh(evidence: RankEvidence) -> bool:
    return any(tensor.mesh is not None for tensor in evidence.parameters)


def _why_no_flows(records: Mapping[int, RankRecord]) -> str:
    """Return why the bytes that are moved of parameters are not derived. Empty if they are.

    A hook chooses what is moved, some parameters have no gradient, or they move in a dtype that the plan lacks. In
    several steps, the first one's packed calls are left out, for they may be set-up.
    """
    for record in records.values():
        for wrapper in record.evidence.structure.values():
            if wrapper.comm_hook:
                return (
                    f"DDP reduces gradients by the communication hook {wrapper.comm_hook}, which chooses what is moved"
                )
    ungraded = _first_ungraded(records.values())
    if ungraded and not _has_trained_nothing(records.values()):
        return f"{names_text(ungraded)} had no gradient: what is moved of them is not derived"
    packed_calls: list[Collective] = []
    steps: set[int] = set()
    for record in records.values():
        packed_calls += [call for call in record.evidence.collectives if _is_packed(call)]
        steps.update(step.step for step in record.evidence.steps)
    if len(steps) > 1:  # set up in the first one
        packed_calls = [call for call in packed_calls if call.step != min(steps)]
    packed = {call.dtype for call in packed_calls}
    return f"parameters or gradients may move as {', '.join(sorted(packed))}" if packed else ""


def _first_ungraded(records: Iterable[RankRecord]) -> Sequence[str]:
    """Return the parameters without a gradient of the first rank and step that has any; empty if none has."""
    for record in records:
        for step in record.steps:
            if step.step and step.ungraded:
                return step.ungraded
    return ()


def _is_packed(call: Collective) -> bool:
    """Return whether a collective inside of passes moves parameters or gradients in a type that the plan does not support."""
    return call.op in ("all_gather", "reduce_scatter") and call.phase in INSIDE_PHASES and call.dtype not in BYTES


def _local_training_text(summaries: Iterable[Summary]) -> str:
    """Return why replicas need not reduce gradients: by what means they train locally. Empty if they need to."""
    means = next(filter(None, map(local_training_means, families_of_replicas(summaries))), "")
    return f"replicas train locally, by {means}" if means else ""


def _has_trained_nothing(records: Iterable[RankRecord]) -> bool:
    """Return whether the optimizers of each rank have all its parameters, and found no gradient in any recorded step.

    Then none was reduced, and all should have been.
    """
    for record in records:
        if not {*record.stepped} >= {tensor.fqn for tensor in record.evidence.parameters}:
            return False
        if {*idle_steps(record)} != {step.step for step in record.steps if step.step}:
            return False
    return True
