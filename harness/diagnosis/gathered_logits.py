"""A loss over a vocabulary that is split over tp, given logits that are gathered already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from harness.diagnosis.assume import another_feature, another_reference
from harness.diagnosis.forward import first_wrong_pass
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.words import traffic_lines
from harness.judge.trial import Trial
from harness.plan.traffic.flow import Flow

Flows = Mapping[int, tuple[Flow, ...]]


def gathered_logits(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Told by the first wrong loss, which is too large by the logarithm of the degree of tp, for all samples: those of some
    ranks alone cannot be trained beside others whose logits are fewer."""
    tp, size = trial.case.dims.tp, trial.case.model.vocab_size
    split = tp > 1 and trial.case.features.loss_parallel and size % tp == 0
    if not split or (wrong := first_wrong_pass(trial, broken)) is None:
        return
    from harness.reference import variations

    found = wrong.tried(variations.gathered_logits(tp), [""])
    if found is not None and found.numbers == 1:  # not of some ranks, which would be one choice more
        one = Hypothesis(found.cause, partial(another_reference, altered=found.altered))
        if "traffic" in broken:
            one = replace(one.and_then(and_their_traffic), lines=tuple(traffic_lines(trial)))
        yield one


def and_their_traffic(trial: Trial) -> Trial:
    """What is gathered is moved beside the sums of the loss."""
    whole, plan = another_feature(trial, loss_parallel=False).plan, trial.plan

    def both(flows: Flows, other: Flows) -> Flows:
        return {rank: (*own, *(flow for flow in other[rank] if flow.role == "logits")) for rank, own in flows.items()}

    flows, even = both(plan.flows, whole.flows), both(plan.even_flows, whole.even_flows)
    return replace(trial, plan=replace(plan, flows=flows, even_flows=even))
