"""The trial of a recorded job, of which a layout alone is declared: for the same checks, as far as they need no more.

Shapes and units of the plan are those that were observed, and precision is that of the collectives. There is no reference.
If a recording does not show what a check needs, the check does not judge it, and says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.measured import Measured
from harness.core.case.traits import TrainerTraits
from harness.core.evidence.provided import WORDS, Provided
from harness.core.evidence.recorded_run import RecordedRun
from harness.core.evidence.recording import RankRecord
from harness.core.evidence.records import RankEvidence
from harness.core.evidence.summary import Summary, idle_steps, summary_of
from harness.core.evidence.text import names_text
from harness.core.evidence.unplaced import unplaced
from harness.core.judge.local_training import local_by
from harness.core.judge.measured import claimed_cut_dims, claimed_units
from harness.core.judge.observed import replicas
from harness.core.judge.traffic import INSIDE
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.core.plan.plan import Plan, without_slices
from harness.core.plan.slices import BYTES
from harness.recording.judged.recorded_ends import exits_of, not_heard
from harness.recording.judged.stored_recording import Recording, not_recorded, recorder_failed
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.record import ReferenceRun

NO_REFERENCE = ReferenceRun({}, (), (), (), np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64))
FREED = "parameters have no elements before the first pass, as under ZeRO-3: where they lie was not seen"
NO_OPTIMIZER = "no step was seen: a step ends where a torch.optim.Optimizer has stepped, and none did"
CUT = "{} degree above 1: what a rank holds of a parameter is not derived"


@dataclass(frozen=True)
class ObservedModel(ModelConfig):
    """Any model, by the parameters that ranks have."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self.shapes)


def trial_of(
    records: Mapping[int, RankRecord],
    dims: ParallelDims,
    directory: str,
    world: int,
    *,
    recording: Recording | None = None,
    like: Mapping[int, int] | None = None,
) -> Trial:
    """records: of all ranks that left one; or of some, with the recording of all, and in `like`, by rank, the one that was read
    instead. Trap: a job may be of more or fewer ranks than the layout."""
    like = {rank: rank for rank in records} if like is None else like
    steps = _steps(records.values())
    ranks = {rank: _of_steps(record.evidence, steps) for rank, record in records.items()}
    heard = recording or _recording_of(records, directory)
    exits = exits_of(heard, world)
    case = _case(dims, ranks, Counter(like.values()), max(steps, default=1))
    units = {rank: claimed_units(evidence) for rank, evidence in ranks.items()}
    of_all = {rank: units[one] for rank, one in sorted(like.items())}
    measured = Measured(of_all, cut_dims=claimed_cut_dims(ranks.values()))
    plan = _plan(case, TrainerTraits(measured=measured), _ignored(ranks.values()))
    if dims.tp * dims.pp > 1 or plan.flat:
        plan = without_slices(plan)
    provided = _provided(case, ranks, records, heard)
    if {evidence.world_size for evidence in ranks.values()} == {dims.world_size} and (why := not_heard(exits, heard)):
        provided = provided.without(("ends",), why, unknown=True)
    run = RecordedRun(
        directory,
        world,
        exits,
        ranks,
        provided=provided,
        chosen=heard.chosen,
        stands=like,
        summaries=dict(sorted(heard.summaries.items())),
    )
    return Trial(case, plan, run, NO_REFERENCE)


def _provided(
    case: Case, ranks: Mapping[int, RankEvidence], records: Mapping[int, RankRecord], heard: Recording
) -> Provided:
    """What a recording shows of a job, in addition to how it ended."""
    found, summaries = heard.provides, heard.summaries.values()
    if heard.world != case.dims.world_size:
        found = found.without(WORDS.keys() - {"ends"}, f"the job has {heard.world} ranks, not those of the layout")
    for word, why in (
        ("slices", _no_slices(case, ranks)),
        ("flows", _no_flows(records) or _local(summaries)),
        ("claims", _no_claims(case, ranks)),
    ):
        found = found.without((word,), why) if why else found
    if why := _claims_not_seen(case, ranks, records):
        found = found.without(("claims",), why, unknown=True)
    if records and all(_stepped_nothing(record) for record in records.values()):
        found = found.unseen(NO_OPTIMIZER).without(("contents",), NO_OPTIMIZER, unknown=True)
    if why := unplaced({rank: one.groups.own for rank, one in heard.summaries.items()}):
        found = found.without(("members",), why, unknown=True)
    if partial := not_recorded(summaries):
        found = found.without(("sizes",), partial, unknown=True).only_partly(("claims", "slices", "contents"), partial)
    if failed := recorder_failed(summaries):
        found = found.unseen(failed).only_partly(found.singly, failed)
    return found


def _stepped_nothing(record: RankRecord) -> bool:
    """Whether a rank trained to its end, and the recorder saw the end of no step."""
    return record.ended == "ok" and not record.evidence.steps and not record.steps_seen


def _plan(case: Case, traits: TrainerTraits, ignored: set[str]) -> Plan:
    """Return the plan, in which a wrapper moves nothing of what it ignores."""
    plan = make_plan(case, traits)
    if not ignored:
        return plan
    shapes = tuple((fqn, shape) for fqn, shape in case.model.parameter_shapes().items() if fqn not in ignored)
    moved = make_plan(replace(case, model=ObservedModel(name="recorded", n_layers=0, shapes=shapes)), traits)
    return replace(plan, flows=moved.flows, even_flows=moved.even_flows, last_flows=moved.last_flows)


def _ignored(ranks: Iterable[RankEvidence]) -> set[str]:
    return {fqn for evidence in ranks for wrapper in evidence.structure.values() for fqn in wrapper.ignored}


def _recording_of(records: Mapping[int, RankRecord], directory: str) -> Recording:
    last = {rank: one.last for rank, one in records.items() if one.last and not one.ended}
    return Recording(Path(directory), {rank: summary_of(one) for rank, one in records.items()}, last=last)


def _steps(records: Iterable[RankRecord]) -> list[int]:
    """Return the steps from the first on that every rank recorded to their end."""
    seen = [{*record.ended_steps} for record in records]
    common = set.intersection(*seen) if seen else set()
    return [step for step in sorted(common) if set(range(1, step + 1)) <= common]


def _of_steps(evidence: RankEvidence, steps: list[int]) -> RankEvidence:
    calls = tuple(call for call in evidence.collectives if call.step in steps or call.step == 0)
    return replace(evidence, steps=tuple(s for s in evidence.steps if s.step in steps), collectives=calls)


# ---- what is requested, as far as a layout says it


def _case(dims: ParallelDims, ranks: Mapping[int, RankEvidence], many: Mapping[int, int], steps: int) -> Case:
    shapes: dict[str, tuple[int, ...]] = {}
    for evidence in ranks.values():
        shapes |= {tensor.fqn: tensor.global_shape for tensor in evidence.parameters}
    model = ObservedModel(name="recorded", n_layers=0, shapes=tuple(shapes.items()))
    stored = _dtype(ranks.values())
    gathered = _moved(ranks, many, "all_gather")
    reduced = _moved(ranks, many, "reduce_scatter") or _moved(ranks, many, "all_reduce")
    training = TrainingConfig(
        steps=steps, dtype=stored or "float32", compute_dtype=gathered if gathered != stored else None
    )
    features = Features(wrapper=_wrapper(dims, ranks.values()), reduce_dtype=reduced)
    return Case("recorded", "a recorded job", dims=dims, model=model, training=training, features=features)


def _dtype(ranks: Iterable[RankEvidence]) -> str | None:
    """Return the dtype of all parameters; None if they have several, or one that the plan does not support."""
    found = {tensor.dtype for evidence in ranks for tensor in evidence.parameters}
    (dtype,) = found if len(found) == 1 else (None,)
    return dtype if dtype in BYTES else None


def _moved(ranks: Mapping[int, RankEvidence], many: Mapping[int, int], op: str) -> str | None:
    """The type in which most bytes of this collective moved in forward and backward. many: ranks that each one stands for."""
    moved: Counter[str] = Counter()
    for rank, evidence in ranks.items():
        for call in evidence.collectives:
            if call.op == op and call.phase in ("forward", "backward") and call.dtype in BYTES:
                moved[call.dtype] += call.bytes * many[rank]
    return max(moved, key=moved.__getitem__) if moved else None


def _kinds(ranks: Iterable[RankEvidence]) -> set[str]:
    return {wrapper.kind for evidence in ranks for wrapper in evidence.structure.values()}


def _wrapper(dims: ParallelDims, ranks: Iterable[RankEvidence]) -> str | None:
    """The one that was seen, if it can do what is requested. A layout of cp alone says no more than that tokens are cut. If no
    wrapper claims to shard parameters over it, each rank may have them whole, as under DDP."""
    ranks = list(ranks)
    kinds, able = _kinds(ranks), ("fsdp2", "fsdp1") if dims.dp_shard * dims.cp > 1 else ("ddp", "replicate", "fsdp1")
    if dims.dp_shard > 1 or dims.cp == 1:
        return next((kind for kind in able if kind in kinds), None)
    unclaimed = "ddp" if not kinds and not _dtensors(ranks) else None
    return next((kind for kind in (*able, "ddp", "replicate") if kind in kinds), unclaimed)


def _no_slices(case: Case, ranks: Mapping[int, RankEvidence]) -> str:
    """Why it is not derived what a rank holds of a parameter; empty if it is."""
    kinds = _kinds(ranks.values())
    if not any(evidence.parameters for evidence in ranks.values()):
        return "no rank recorded any parameter"
    if case.dims.tp * case.dims.pp > 1:
        return CUT.format("tp or pp")
    if _dtype(ranks.values()) is None:
        return "parameters have several types, or one whose bytes are not derived"
    if "fsdp1" in kinds:
        return "FSDP1 cuts vectors of many parameters, which are not derived"
    if case.dims.dp * case.dims.cp > 1 and not kinds:
        return "no data-parallel wrapper of torch's was seen"
    if own := _own_parameters(ranks.values()):
        return f"ranks have parameters of their own ({own}), which their wrappers ignore"
    return f"several kinds of wrappers: {', '.join(sorted(kinds))}" if len(kinds) > 1 else ""


def _no_claims(case: Case, ranks: Mapping[int, RankEvidence]) -> str:
    claimed = case.shards > 1 or _kinds(ranks.values()) or _dtensors(ranks.values()) or _freed(ranks.values())
    return "" if claimed else "nothing says where it lies: plain tensors, and no wrapper of torch's was seen"


def _own_parameters(ranks: Iterable[RankEvidence]) -> str:
    """One that some ranks do not have, if wrappers ignore all of these, as experts that have names of their own."""
    ranks = list(ranks)
    held = Counter(tensor.fqn for evidence in ranks for tensor in evidence.parameters)
    own = {fqn for fqn, count in held.items() if count < len(ranks)}
    return min(own) if own and own <= _ignored(ranks) else ""


def _claims_not_seen(case: Case, ranks: Mapping[int, RankEvidence], records: Mapping[int, RankRecord]) -> str:
    """Why it was not seen where parameters lie; empty if it was, or there is nothing to see."""
    if _kinds(ranks.values()) or _dtensors(ranks.values()):
        return ""
    if _freed(ranks.values()):
        return FREED
    if case.shards == 1 or not _steps_on_others(records):
        return ""
    return "what is stepped on is no parameter of the model, as under ZeRO: where it lies was not seen"


def _freed(ranks: Iterable[RankEvidence]) -> bool:
    """Whether all parameters of a rank are empty before its first pass: replicas have them whole, and so do shards a part."""
    held = ([tensor.value.size for tensor in evidence.parameters] for evidence in ranks)
    return any(sizes and not any(sizes) for sizes in held)


def _steps_on_others(records: Mapping[int, RankRecord]) -> bool:
    """In no step recorded has any rank an optimizer that found a gradient in a parameter of the model, nor one that has any."""
    steps = [(step, record) for record in records.values() for step in record.steps if step.step]
    return bool(steps) and all(
        not record.stepped and {*step.ungraded} >= {tensor.fqn for tensor in record.evidence.parameters}
        for step, record in steps
    )


def _dtensors(ranks: Iterable[RankEvidence]) -> bool:
    return any(tensor.mesh is not None for evidence in ranks for tensor in evidence.parameters)


def _no_flows(records: Mapping[int, RankRecord]) -> str:
    """Why the bytes that are moved of parameters are not: a hook chooses them, some are not trained, or they move as something
    else."""
    hooks = (w.comm_hook for record in records.values() for w in record.evidence.structure.values() if w.comm_hook)
    if hook := next(hooks, ""):
        return f"DDP reduces gradients by the communication hook {hook}, which chooses what is moved"
    ungraded = next((s.ungraded for r in records.values() for s in r.steps if s.step and s.ungraded), ())
    if ungraded and not _nothing_trained(records.values()):
        return f"{names_text(ungraded)} had no gradient: what is moved of them is not derived"
    calls = [call for record in records.values() for call in record.evidence.collectives]
    moved = [
        c for c in calls if c.op in ("all_gather", "reduce_scatter") and c.phase in INSIDE and c.dtype not in BYTES
    ]
    steps = {step.step for record in records.values() for step in record.evidence.steps}
    packed = (
        {c.dtype for c in moved} if len(steps) < 2 else {c.dtype for c in moved if c.step != min(steps)}
    )  # set up there
    return f"parameters or gradients may move as {', '.join(sorted(packed))}" if packed else ""


def _local(summaries: Iterable[Summary]) -> str:
    """Why replicas need not reduce gradients; empty if they need."""
    how = next(filter(None, map(local_by, replicas(summaries))), "")
    return f"replicas train locally, by {how}" if how else ""


def _nothing_trained(records: Iterable[RankRecord]) -> bool:
    """Optimizers have all parameters, and never found a gradient: none was reduced, and all should have been."""
    return all(
        {*one.stepped} >= {tensor.fqn for tensor in one.evidence.parameters}
        and {*idle_steps(one)} == {step.step for step in one.steps if step.step}
        for one in records
    )
