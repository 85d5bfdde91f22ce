"""A loss over a split vocabulary that is given gathered logits: named where it is split, and nothing is computed elsewhere."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import broken
from literal import ADAMW, TINY, tiny_case, trial_of, with_every_rank, with_rank, with_step
from trained import MODEL, RECIPE, Ran, _ran, case_of, diagnosed  # noqa: F401

from harness.diagnosis.gathered_logits import and_their_traffic
from harness.diagnosis.gathered_logits import gathered_logits as suspects
from harness.evidence.records import Collective
from harness.judge.trial import Trial
from harness.reference.altered import altering
from harness.reference.variations import gathered_logits, variations
from harness.report.cause_text import diagnosis_line
from harness.spec.case import Case

GATHERED = "the loss over a split vocabulary is given gathered logits: its normaliser counts each logit 2 times"


@pytest.mark.parametrize("moved", [True, False])
def test_a_split_loss_of_gathered_logits_is_named_with_their_traffic_and_without(ran: Ran, moved: bool) -> None:
    trial = ran(case_of("tp_2"), altered=altering(gathered_logits(2), [""], 1))
    if moved:
        flows = and_their_traffic(trial).plan.flows[0]
        (logits,) = [flow for flow in flows if flow.role == "logits"]
        trial = with_every_rank(trial, lambda t, rank: gathering(t, rank, logits.bytes))
    found = diagnosed(trial)
    assert (diagnosis_line(found), found.kinds) == (f"{GATHERED}, requested each rank's slice", ("gathered logits",))
    assert {"traffic", "not explained", "still failing", "tried"} & dict(found.evidence).keys() == (
        {"traffic"} if moved else set()
    )


def gathering(trial: Trial, rank: int, moved: int) -> Trial:
    """All ranks of tp gather so many bytes more in each forward pass."""
    evidence = trial.ranks[rank]
    more = [
        Collective("all_gather", (0, 1), "(0, 1)", "float64", moved, "forward", step, len(evidence.collectives) + step)
        for step in trial.case.steps
    ]
    return with_rank(trial, rank, collectives=(*evidence.collectives, *more))


def test_a_split_loss_of_gathered_logits_is_not_named_where_only_the_loss_is_so_much_larger(ran: Ran) -> None:
    (counted,) = [one for one in variations(MODEL, RECIPE) if one.name == "normaliser"][:1]
    trial = ran(case_of("tp_2"), altered=altering(counted, [""], 1))
    assert diagnosed(trial).kinds == ("normaliser",)


def test_a_loss_that_is_so_much_larger_on_some_data_ranks_alone_is_not_of_gathered_logits(ran: Ran) -> None:
    trial = ran(case_of("fsdp_2_tp_2"))
    for ranks, told in (((0, 1), 0), ((0, 1, 2, 3), 1)):
        larger = trial
        for rank in ranks:
            (part,) = trial.ranks[rank].steps[0].microbatches
            assert part.labels is not None
            more = replace(part, loss_sum=part.loss_sum + np.sum(part.labels >= 0) * math.log(2))
            larger = with_step(larger, rank, 1, microbatches=(more,))
        assert len([*suspects(larger, broken("loss"))]) == told


def test_without_traffic_of_their_own_gathered_logits_are_the_models_alone(ran: Ran) -> None:
    trial = ran(case_of("tp_2"), altered=altering(gathered_logits(2), [""], 1))
    for checks, roles in ((("loss",), []), (("loss", "traffic"), ["logits"])):
        (one,) = suspects(trial, broken(*checks))
        assert one.assume is not None
        assert [flow.role for flow in one.assume(trial).plan.flows[0] if flow.role == "logits"] == roles


@pytest.mark.parametrize(
    ("case", "split"),
    [
        (tiny_case("tp_2"), True),
        (tiny_case("fsdp_2"), False),
        (tiny_case("tp_2", loss_parallel=False), False),
        (tiny_case("tp_2", ADAMW, model=replace(TINY, vocab_size=7)), False),
    ],
    ids=["split", "no tp", "no loss parallel", "a vocabulary that tp does not divide"],
)
def test_only_of_a_loss_that_is_split_over_tp_a_forward_pass_is_computed(
    monkeypatch: pytest.MonkeyPatch, case: Case, split: bool
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(sys.modules[suspects.__module__], "first_wrong_pass", lambda trial, _: asked.append(trial))
    assert not [*suspects(trial_of(case), broken("loss"))]
    assert bool(asked) == split
