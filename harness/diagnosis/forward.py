"""What is left where no factor and no mix of samples explains a gradient: the forward pass, or backward, and where in it."""

from __future__ import annotations

import math

from harness.diagnosis.differences import Pair, distance, fqns_of, loss_off, where_text
from harness.diagnosis.words import on_ranks
from harness.judge.losses import global_loss, losses
from harness.judge.received_samples import received_samples
from harness.judge.trial import Trial
from harness.spec.dims import AXES


def unexplained(trial: Trial, wrong: list[Pair]) -> str:
    where, largest = where_text(trial, wrong), max(distance(trial, rank, fqn) for rank, fqn in wrong)
    off = loss_off(trial)
    if largest < 1e-6 and (off or 0.0) < 1e-6:
        what = f"gradients are off by {largest:.0e} {where}" + (f", the loss of step 1 by {off:.0e}" if off else "")
        return f"{what}: no more than arithmetic in float32 rounds, requested {trial.case.training.dtype}"
    if off and (again := _counted_again(trial)):
        return again
    if off:
        text = f"the forward pass is wrong: the loss of step 1 is off by {off:.1e} though weights and samples are right"
        text += _first_wrong_input(trial)
        return text + (", look at the masks of attention over cp" if trial.case.dims.cp > 1 else "")
    return _paired_wrongly(trial, wrong) or f"gradients are wrong {where}: {_matching_loss(trial)}"


def _matching_loss(trial: Trial) -> str:
    """Said of gradients that are the first to be wrong."""
    dims, bound = trial.case.dims, f"the loss of step 1 matches within {trial.bounds.loss[1]:.0e}"
    undivided = dims.cp > 1 and (dims.dp > 1 or trial.case.passes > 1)  # whose tokens count for what is not seen then
    return bound + (", summed over tokens; what each rank divides it by is not seen" if undivided else "")


def _first_wrong_input(trial: Trial) -> str:
    """The first module in forward's order into which something of another length goes, and the last before it."""
    right, close = "", 1e-9 if trial.case.exact else trial.bounds.loss[1]  # a mean over many numbers, as the loss is
    for fqn, wanted in trial.reference.inputs.items():
        seen = [step.activity.inputs[fqn] for _, step, _ in trial.steps() if fqn in step.activity.inputs]
        if not seen:
            continue
        if not math.isclose(
            sum(squares for squares, _ in seen), wanted * sum(count for _, count in seen), rel_tol=close
        ):
            if not right:
                return f": {_input_words(trial, fqn)} does not match the reference in mean square"
            before = f"{_input_words(trial, right)} matches the reference in mean square"
            return f": {before}, {_input_words(trial, fqn)} does not{_in_attention(right, fqn)}"
        right = fqn
    same = "what goes into each module matches the reference in mean square: it is the loss itself (smoothing,"
    same += " scale of logits), or something turns or changes places"
    return f": {same}" if right else ""


def _input_words(trial: Trial, fqn: str) -> str:
    """Without dropout there is no such module: what would go into it is what the part of the block before it gives."""
    block, _, name = fqn.rpartition(".")
    part = {"attention_dropout": "attention", "ffn_dropout": "feed_forward"}.get(name)
    return f"what {block}.{part} gives" if part and not trial.case.model.dropout else f"what goes into {fqn}"


def _in_attention(right: str, wrong: str) -> str:
    """Between queries, keys and values and what attention makes of them there is little that can be wrong."""
    block = right.removesuffix(".inner_attention")
    return ": angles, mask, scale or the order of tokens" if block != right and wrong == f"{block}.wo" else ""


def _paired_wrongly(trial: Trial, wrong: list[Pair]) -> str | None:
    """Wrong on the members of one reducing group only, others of which are right: what is common to them is the group."""
    ranks = sorted({rank for rank, _ in wrong})
    axes = {flow.axis for flow in trial.plan.flows[ranks[0]] if flow.role == "gradients"}
    for axis in sorted(axes):
        group = trial.plan.group_of(ranks[0], axis)
        if tuple(ranks) == group and len(group) < len(trial.ranks) and len(fqns_of(trial, wrong)) > 1:
            return (
                f"gradients are wrong {where_text(trial, wrong)}, one group of {axis}: its members reduce different tensors"
                " with each other, in another order or not all, or one of them passes a wrong one"
            )
    return None


def _counted_again(trial: Trial) -> str | None:
    """The loss of step 1 is too large by the logarithm of a degree: exp(logit) is summed over ranks that hold the same."""
    extra = (global_loss(trial, 1) or 0.0) - trial.reference.steps[0].loss
    for axis in trial.plan.groups:
        if axis in AXES and math.isclose(extra, math.log(getattr(trial.case.dims, axis)), rel_tol=1e-6):
            text = f"too large by {extra:.6g} a token, the logarithm of {axis} {getattr(trial.case.dims, axis)}"
            return f"the loss of step 1 is {text}: its normaliser counts each logit once for every rank along {axis}"
    return None


def documents_see_each_other(trial: Trial, wrong: list[Pair]) -> str | None:
    """Ranks whose losses are those that the reference has without a document mask."""
    ranks = [rank for rank in trial.last_stages() if _looks_past_separators(trial, rank)]
    if not ranks:
        return None
    text = "the losses of step 1 are those without a document mask, which is requested"
    return f"documents see each other{on_ranks(trial, ranks)}: {text}"


def _looks_past_separators(trial: Trial, rank: int) -> bool:
    unmasked, ids = trial.reference.unmasked_losses, received_samples(trial, 1).get(trial.feeder(rank), [])
    if unmasked is None or None in ids:
        return False
    by_id = dict(zip(trial.reference.samples[0], unmasked.tolist(), strict=True))
    expected = math.fsum(by_id.get(id_, math.nan) for id_ in ids if id_ is not None)
    seen = math.fsum(total for total, _ in losses(trial, rank, 1))
    return expected != 0 and math.isclose(seen, expected, rel_tol=trial.bounds.loss[1])
