"""What was seen of gradients in the first step that is wrong, where no one reference tells what follows of it.

Numbers that are not finite, shapes, collectives of backward that did not run, shares that were not added, and the place down
to which gradients are right.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from harness.checks.features import LACKING
from harness.diagnosis.differences import (
    consequences,
    distance,
    expected_gradient,
    first_wrong_step,
    loss_off,
    seen_gradients,
    wrong_pairs,
)
from harness.diagnosis.hypothesis import NOT_TESTED, Broken, Fact
from harness.diagnosis.layout import wrong_parts
from harness.diagnosis.words import (
    Pair,
    finding_line,
    groups_text,
    in_order,
    rank_words,
    some,
    traffic_lines,
    where_text,
)
from harness.judge.contents import take
from harness.judge.received_samples import shares_of_samples
from harness.judge.result import Cause
from harness.judge.tolerance import relative_difference
from harness.judge.traffic import axis_of
from harness.judge.traffic import observed as observed_traffic
from harness.judge.traffic import planned as planned_traffic
from harness.judge.trial import Trial

TIED = "tok_embeddings.weight"  # the output's weight as well, where embeddings are tied


def wrong_backward(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """The first of these that is seen, beside what another layout leads to; what is not exchanged over cp also where
    gradients are not judged."""
    step = ("gradients" in broken and first_wrong_step(trial)) or trial.first_step
    wrong = wrong_pairs(trial, step) if "gradients" in broken else []
    if not wrong:
        looks = [_no_exchange] * ("traffic" in broken)
    else:
        of_traffic = (_no_exchange, _other_groups) if "traffic" in broken else ()
        looks = [_misshapen, _not_finite, *of_traffic, _norms_not_summed, partial(_untied, broken), _lost_before]
    if wrong and (fact := _of_another_layout(trial, step)):
        yield fact
        looks = [look for look in looks if look is not _other_groups]
    seen = (fact for look in looks if (fact := look(trial, wrong, step)))
    yield from itertools.islice(seen, 1)


def _misshapen(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    held = {(rank, tensor.fqn): tensor.value.shape for rank, e in trial.ranks.items() for tensor in e.parameters}
    for rank, parts in trial.plan.gradient_slices.items():  # ZeRO's are of a part
        held |= {(rank, fqn): tuple(stop - start for start, stop in part) for fqn, part in parts.items()}
    bad = [at for at in wrong if at in held and seen_gradients(trial, at[0], step)[at[1]].shape != held[at]]
    if not bad:
        return None
    rank, fqn = bad[0]
    shape = seen_gradients(trial, rank, step)[fqn].shape
    seen = f"rank {rank}, {fqn}: gradient {shape} of a parameter {held[rank, fqn]}"
    text = f"gradients have another shape than their parameters {where_text(trial, bad)}: {seen}"
    return Fact(Cause("gradients misshapen", text), consequences(trial, step))


def _not_finite(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """All numbers after that follow."""
    bad = [at for at in wrong if not np.isfinite(seen_gradients(trial, at[0], step)[at[1]]).all()]
    if not bad:
        return None
    records = (record for evidence in trial.ranks.values() for record in evidence.steps if record.step == step)
    seen = [part.loss_sum for record in records for part in record.microbatches if part.loss_sum is not None]
    finite = all(map(math.isfinite, seen))
    what = "gradients are" if finite else "loss and gradients are"
    text = f"{what} NaN or infinite in step {step} {where_text(trial, bad)}"
    text += ", the losses are finite" * bool(finite and seen)
    checks = (*consequences(trial, step), "finite")
    return Fact(Cause("not finite", text + (_mean_over_none(trial, step) if finite else "")), checks)


def _mean_over_none(trial: Trial, step: int) -> str:
    masked = (trial.reference.labels[:, : trial.case.seq_len(step)] < 0).all(axis=1)
    without = {trial.reference.sample_ids[row] for row in np.flatnonzero(masked)}
    empty = [rank for rank, ids in shares_of_samples(trial, step).items() if ids and without.issuperset(ids)]
    have = "has" if len(empty) == 1 else "have"
    return f": {rank_words(empty)} {have} no valid token, and a mean over none is 0/0" if empty else ""


OF_ATTENTION = {  # in backward keys and values may go round again, by the same collective as their gradients
    ("keys and values", "forward"): "no K/V exchange over cp",
    ("gradients of keys and values", "backward"): "no exchange of K/V gradients over cp: each rank keeps its own",
}


def _no_exchange(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """Context parallel: planned flows of attention over cp of which nothing was seen, beside what else runs there."""
    rank = min(trial.ranks)
    seen, flows = observed_traffic(trial, trial.ranks[rank], step), trial.plan.flows_of(rank, step)
    checks = ("traffic", "exchange", "reshard", "features", *(consequences(trial, step) if wrong else ()))
    for place, text in OF_ATTENTION.items():
        for flow in (flow for flow in flows if (flow.role, flow.phase) == place):
            alike = [f for f in flows if f is not flow and (f.axis, f.op, f.phase) == (flow.axis, flow.op, flow.phase)]
            if seen.get((trial.plan.group_of(rank, flow.axis), flow.op, flow.phase), 0) <= sum(f.bytes for f in alike):
                lines = NOT_TESTED if wrong else tuple(traffic_lines(trial))
                return Fact(Cause("K/V not exchanged", text), checks, lines)
    return None


def _other_groups(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """Axes over which some rank should reduce gradients and nothing ran; and the groups over which it ran instead."""
    missing = silent_axes(trial, step)
    if not missing:
        return None
    texts = [f"no {op} ran over {groups_text(trial.plan.groups[axis])}" for axis, op in missing.items()]
    instead = sorted({ranks for op in missing.values() for ranks in _groups_of_no_axis(trial, op)})
    more = f", but over {groups_text(instead)}" if instead else ""
    text = f"gradient reduction missing over {' and '.join(missing)}: {', '.join(texts)}{more}"
    checks = ("traffic", "process_groups", "placements", *consequences(trial, step))
    return Fact(Cause("gradients not reduced", text), checks, (*traffic_lines(trial), *NOT_TESTED))


def _of_another_layout(trial: Trial, step: int) -> Fact | None:
    """Where ranks hold other slices: axes between whose ranks nothing that runs in backward sums gradients."""
    rank, ops = min(trial.ranks), ("all_reduce", "reduce_scatter")
    calls = (call for call in trial.ranks[rank].collectives if call.phase in ("backward", "pipeline"))
    used = {call.ranks for call in calls if call.op in ops and "float" in call.dtype}
    axes = [axis for axis in ("dp_replicate", "dp_shard", "cp") if axis in trial.plan.groups]
    lines = {axis: {*trial.plan.group_of(rank, axis)} for axis in axes}
    missing = [axis for axis, line in lines.items() if not any(len(line & {*ranks}) > 1 for ranks in used)]
    if not missing or not wrong_parts(trial):
        return None
    text = f"gradient reduction missing over {' and '.join(missing)}"
    return Fact(Cause("gradients not reduced", text), consequences(trial, step), NOT_TESTED)


def silent_axes(trial: Trial, step: int) -> dict[str, str]:
    """Axes over which some rank should reduce gradients in a step and nothing ran, with the collective that should."""
    missing: dict[str, str] = {}
    for rank, evidence in sorted(trial.ranks.items()):
        seen = observed_traffic(trial, evidence, step)
        for flow in trial.plan.flows_of(rank, step):
            if flow.role == "gradients" and not seen.get((trial.plan.group_of(rank, flow.axis), flow.op, flow.phase)):
                missing[flow.axis] = flow.op
    return missing


def _groups_of_no_axis(trial: Trial, op: str) -> set[tuple[int, ...]]:
    """The groups over which an operation ran in backward, and that the plan does not know."""
    known = {group for groups in trial.plan.groups.values() for group in groups}
    calls = (call for evidence in trial.ranks.values() for call in evidence.collectives)
    return {c.ranks for c in calls if (c.op, c.phase) == (op, "backward") and len(c.ranks) > 1} - known


def _norms_not_summed(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """Weights that are whole on every tp rank: each rank's gradient is a share; the shares sum to the reference's."""
    fqns = in_order(trial, (fqn for _, fqn in wrong))
    if trial.case.dims.tp == 1 or not all("norm" in fqn for fqn in fqns):
        return None
    for group in trial.plan.groups["tp"]:
        of_group = [seen_gradients(trial, rank, step) for rank in group]
        for fqn in (fqn for fqn in fqns if all(fqn in seen for seen in of_group)):  # under ZeRO some have nothing of it
            total = np.asarray(sum(seen[fqn] for seen in of_group))
            expected = expected_gradient(trial, group[0], fqn, step)
            if expected is None or relative_difference(total, expected) > 1e-9:
                return None
    text = f"gradients of {_which_norms(trial, fqns)} are not summed over tp"
    text += f": {len(fqns)} parameter{'s' * (len(fqns) > 1)} wrong, all others right"
    why = "with sequence parallel each tp rank's norms see their part of the sequence; the sum over tp is missing"
    tested = f"in step {step} what the ranks of a tp group have sums to the reference's gradients; later weights differ"
    return Fact(Cause("norms not summed", text), consequences(trial, step), (("why", why), ("tested", tested)))


def _which_norms(trial: Trial, fqns: list[str]) -> str:
    """ffn_norm, where it is that one of every layer."""
    every, names = [fqn for fqn in trial.plan.shapes if "norm" in fqn], {fqn.split(".")[-2] for fqn in fqns}
    if fqns == every:
        return "norm weights"
    whole = fqns == [fqn for fqn in every if fqn.split(".")[-2] in names]
    return " and ".join(sorted(names)) if whole else some(fqns, 4)


def _untied(broken: Broken, trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """The embedding alone gives a gradient to the rows of tokens that were read; rows of others get the output's only. It may
    be that its matmul is not done."""
    model = trial.case.model
    if not model.tied_embeddings or in_order(trial, (fqn for _, fqn in wrong)) != [TIED]:
        return None
    of_step = np.isin(trial.reference.sample_ids, trial.reference.samples[step - 1])
    read = trial.reference.tokens[of_step, : trial.case.seq_len(step)]
    unread = np.repeat(~np.isin(np.arange(model.vocab_size), read), model.dim)
    unread = unread.reshape(trial.plan.shapes[TIED])  # which may be a vector
    for rank, _ in wrong:
        part, seen = trial.gradient_slice_of(rank, TIED), seen_gradients(trial, rank, step)[TIED]
        if part is None or not unread.any() or np.any(seen[take(unread, part)]):
            return None
    text = f"the gradient of the tied weight lacks the output's part: {TIED} has only the embedding's"
    tested = f"in step {step} all rows of tokens that were not read are zero, all other parameters are right"
    not_done = "features" in broken and all(each.quantity == LACKING for each in broken["features"].findings)
    checks = (*consequences(trial, step), *(("features",) if not_done else ()))
    return Fact(Cause("tied weight without the output's part", text), checks, (("tested", tested),))


def _lost_before(trial: Trial, wrong: list[Pair], step: int) -> Fact | None:
    """Right down to some place that backward passes, wrong in all that it reaches later, and less was moved than planned. The
    place alone is no cause."""
    bad = {fqn for _, fqn in wrong}
    right = sorted((fqn for fqn in trial.plan.shapes if fqn not in bad), key=depth)
    if not right or loss_off(trial, step) or not max(map(depth, bad)) < depth(right[0]):
        return None
    if not (less := _less_than_planned(trial, step)):
        return None
    first = [fqn for fqn in right if depth(fqn) == depth(right[0])]
    text = f"gradients are right in {some(first)}{' and what follows' * (len(first) < len(right))}, and wrong in all"
    text += f" parameters before: {less}"
    return Fact(Cause("lost in backward", text), ("traffic", *consequences(trial, step)), NOT_TESTED)


ATTENTION = {"attention_norm": 0, "wq": 1, "wk": 1, "wv": 1, "wo": 2}
PLACES = {"tok_embeddings": 0, **ATTENTION, "ffn_norm": 3, "w1": 4, "w3": 4, "w2": 5, "norm": 6, "output": 7}


def depth(fqn: str) -> tuple[float, int]:
    """When forward comes to a parameter: layer, and place in it. The embedding is layer -1, norm and output are last."""
    *path, module, _ = fqn.split(".")
    outside = -1 if module == "tok_embeddings" else math.inf
    return int(path[1]) if path else outside, PLACES[module]


def _less_than_planned(trial: Trial, step: int) -> str:
    """The axes over which the first rank moved less in backward than the plan says, besides its gradients."""
    rank = min(trial.ranks)
    seen = observed_traffic(trial, trial.ranks[rank], step)
    wanted, spare = (planned_traffic(trial, rank, step, optional_only=only) for only in (False, True))
    least = {key: size - spare.get(key, 0) for key, size in wanted.items() if key[2] == "backward"}
    short = (axis_of(trial, key[0]) for key, size in least.items() if seen.get(key, 0) < size)
    axes = " and ".join(dict.fromkeys(short))
    return f"backward moves less than planned over {axes}" if axes else ""


def random_state_not_restored(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """A recomputation starts from another state of the generator than forward, and draws from it."""
    seen = [step.activity for _, step, _ in trial.steps()]
    other, drawn = {fqn for one in seen for fqn in one.other_states}, any(one.random.get("backward") for one in seen)
    if not other or not drawn or "gradients" not in broken:
        return
    blocks = sorted(fqn for fqn in other if not any(fqn.startswith(f"{outer}.") for outer in other))
    observed = f"recomputation of {some(blocks, 4)} starts from another random state than forward"
    cause = Cause("random state not restored", observed, hint="its dropout masks differ from those of the loss")
    yield Fact(cause, ("gradients", "grad_norm", "loss", "reported_loss"), (finding_line(broken["gradients"]),))


# ---- losses of one model that differ


FLOAT32 = 1e-6  # relative to the largest


def rounding(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Of float64: all losses and the gradients of step 1 are off by less than float32 rounds."""
    if "gradients" not in broken or not trial.case.exact:
        return
    wrong = wrong_pairs(trial, 1)
    gradients = [distance(trial, rank, fqn, 1) for rank, fqn in wrong]
    losses = [loss_off(trial, step) or 0.0 for step in trial.case.steps]
    if wrong and all(off < FLOAT32 for off in (*losses, *gradients)):
        observed = f"gradients are off by {max(gradients):.0e}"
        where = where_text(trial, wrong) + f", the loss by {max(losses):.0e}" * any(losses)
        hint = "no more than arithmetic in float32 rounds, requested float64"
        yield Fact(Cause("rounded", observed, where, hint=hint), ("gradients", "loss", "grad_norm", "reported_loss"))
