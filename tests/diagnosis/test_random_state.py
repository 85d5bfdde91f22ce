"""Random numbers of a recomputation that are not those of forward: trained in earnest, named, and told with what follows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from diagnosed import broken, here
from literal import tiny_case, trial_of, with_step
from trained import MODEL, Ran, _ran, case_of, diagnosed  # noqa: F401

from harness.diagnosis.assume import another_reference
from harness.diagnosis.random_state import masks_drawn_again
from harness.judge.trial import Trial
from harness.reference import masks
from harness.reference.masks import recomputed_without_random_state
from harness.report.cause_text import cause_line, evidence_rows

CASE = case_of("ddp_2", model=replace(MODEL, dropout=0.25), activation_checkpointing="full")


def with_other_states(trial: Trial, *blocks: str) -> Trial:
    for rank, step, _ in list(trial.steps()):
        random = {"forward": 2, "backward": 2}
        activity = replace(step.activity, random=random, other_states=dict.fromkeys(blocks, 1))
        trial = with_step(trial, rank, step.step, activity=activity)
    return trial


def told(trial: Trial) -> tuple[str, dict[str, str]]:
    found = diagnosed(trial)
    return cause_line(found.causes[0]), dict(evidence_rows(found.evidence))


def test_the_outermost_blocks_are_assumed_to_draw_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "recomputed_without_random_state", lambda blocks: ("draws again", blocks))
    trial = with_other_states(trial_of(tiny_case("ddp_2")), "layers.1", "layers.0.attention", "layers.0", "layers.10")
    (one,) = masks_drawn_again(trial, broken("gradients"))
    assert (one.fitted, one.seen) == (1, ("gradients", "grad_norm", "loss", "reported_loss"))
    assert one.lines == (here("gradients"),)
    assert isinstance(one.assume, partial) and one.assume.func is another_reference
    assert one.assume.keywords == {"altered": ("draws again", ["layers.0", "layers.1", "layers.10"])}


def test_gradients_of_masks_that_are_drawn_again_follow_from_that(ran: Ran) -> None:
    """Of the checks that fail, only `features` does not: literal ranks count other matmuls."""
    cause, evidence = told(
        with_other_states(ran(CASE, altered=recomputed_without_random_state(["layers.0"])), "layers.0")
    )
    started = "recomputation of layers.0 starts from another random state than forward"
    assert cause == f"{started}: its dropout masks differ from those of the loss"
    assert (
        evidence["assuming this"]
        == "5 of 6 failing checks pass, and no passing check fails; seen, not proven: features"
    )
    assert evidence["gradients"].startswith("rank 0, step 1, gradient of layers.0.attention.wq.weight: ")
    assert not {"not explained", "still failing"} & evidence.keys()


def test_gradients_that_do_not_follow_from_masks_that_are_drawn_again_are_said_to_be_left(ran: Ran) -> None:
    halved = ran(CASE, gradients=lambda step, own: {fqn: gradient / 2 for fqn, gradient in own.items()})
    cause, evidence = told(with_other_states(halved, "layers.0"))
    assert cause.startswith("gradients are 0.5 times what they should be in every parameter")
    assert "dropout masks" not in cause
