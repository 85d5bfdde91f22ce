"""What is proposed of a model that computes something else, where few variations are known: whole texts, and what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from diagnosed import broken
from literal import judged, with_step, with_value
from noisy import with_noise
from torch import Tensor
from trained import MODEL, RECIPE, Ran, _ran, case_of, with_inputs  # noqa: F401

from harness.diagnosis import forward
from harness.diagnosis.forward import Tries, _both, other_forward
from harness.judge.result import Verdict
from harness.judge.trial import Trial
from harness.reference import fitted, rounding, variations
from harness.reference.altered import Variation, altering, put_instead
from harness.reference.data import IGNORED
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims

LAYERS = replace(MODEL, n_layers=3)
KNOWN = {one.observed: one for one in variations.variations(LAYERS, RECIPE)}
GELU, KEYS = KNOWN["the feed-forward's activation is GELU"], KNOWN["keys are not rotated, queries are"]
LOGITS, MEAN = KNOWN["logits are divided by sqrt(dim)"], KNOWN["the norm subtracts the mean"]
EACH = [f"layers.{layer}.feed_forward" for layer in range(3)]
ATTENTION, FEED_FORWARD = ["layers.0.attention"], ["layers.0.feed_forward"]
LAST_ROWS = np.arange(8) >= 4
FAMILIES = {family.of(1.0).name: family for family in fitted.families(MODEL)}


def knowing(monkeypatch: pytest.MonkeyPatch, *known: Variation, families: Sequence[fitted.Family] = ()) -> None:
    """Of all variations there are only these."""
    monkeypatch.setattr(variations, "variations", lambda model, training, degrees: list(known))
    monkeypatch.setattr(rounding, "low_sums", lambda training, passes: [])
    monkeypatch.setattr(fitted, "families", lambda model: list(families))


def hypotheses(trial: Trial, *checks: str) -> list[tuple[str, int, tuple[tuple[str, str], ...]]]:
    """Under each, the loss is right."""
    found = list(other_forward(trial, broken("loss", *checks)))
    for one in found:
        assert isinstance(one.assume, partial) and None not in one.assume.keywords.values()
        assert judged("loss", one.assume(trial)).verdict is Verdict.PASS
    return [(cause_line(one.cause), one.fitted, one.lines) for one in found]


# ---- where and since when


@pytest.mark.parametrize(
    ("layout", "modules", "since", "rows", "where", "numbers"),
    [
        (ParallelDims(dp_shard=2), EACH, 1, None, "", 1),
        (ParallelDims(dp_shard=2), EACH[1:2], 1, None, " in layers.1.feed_forward", 1),
        (ParallelDims(dp_shard=2), EACH, 2, None, " from step 2 on", 1),
        (ParallelDims(dp_shard=2), EACH[2:], 3, None, " in layers.2.feed_forward in step 3", 1),
        (ParallelDims(dp_shard=2), EACH, 1, LAST_ROWS, " on rank 1", 2),
        (ParallelDims(dp_shard=2), EACH[:1], 1, ~LAST_ROWS, " in layers.0.feed_forward on rank 0", 2),
        (ParallelDims(dp_shard=2), EACH, 2, LAST_ROWS, " on rank 1 from step 2 on", 2),
        (ParallelDims(dp_shard=2, tp=2), EACH, 1, LAST_ROWS, " on ranks [2,3]", 2),
        (ParallelDims(dp_shard=2, cp=2), EACH, 1, ~LAST_ROWS, " on ranks [0,1]", 2),
    ],
)
def test_modules_ranks_and_steps_that_compute_otherwise_are_told(
    ran: Ran,
    monkeypatch: pytest.MonkeyPatch,
    layout: ParallelDims,
    modules: list[str],
    since: int,
    rows: np.ndarray | None,
    where: str,
    numbers: int,
) -> None:
    knowing(monkeypatch, GELU, KEYS, MEAN)
    trial = ran(case_of(layout, model=LAYERS), altered=altering(GELU, modules, since, rows))
    assert hypotheses(trial) == [(f"{GELU.observed}{where}, requested SiLU", numbers, ())]


def test_checks_whose_mistakes_go_first_leave_nothing_to_search_for(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    knowing(monkeypatch, GELU)
    at_once, later = (ran(case_of(), altered=altering(GELU, FEED_FORWARD, since)) for since in (1, 2))

    def found(trial: Trial, *checks: str) -> int:
        return len(list(other_forward(trial, broken(*checks))))

    first = ("completed", "samples", "placements", "shard_contents", "process_groups")
    assert [found(at_once, "loss", check) for check in first] == [0] * 5
    assert [found(later, "loss", check) for check in (*first, "update", "resume")] == [0] * 7
    assert [found(one) for one in (at_once, later)] == [0, 0] and found(ran(case_of()), "loss") == 0
    wrong = [with_value(later, 0, step, "gradients", "norm.weight", lambda g: g + 1) for step in (1, 2, 3)]
    assert [found(one, "loss", "gradients") for one in wrong] == [0, 1, 1]
    assert [found(at_once, "loss", "positions", "update", "resume"), found(later, "loss", "gradients")] == [1, 1]
    assert found(at_once, "loss", "positions", "samples") == 0
    assert found(at_once.assuming(references={0: at_once.reference}), "loss") == 0


def test_losses_that_are_those_of_the_samples_received_are_right(ran: Ran) -> None:
    trial = ran(case_of())
    other = with_step(trial, 1, 1, microbatches=trial.ranks[0].steps[0].microbatches)
    assert Tries(other, 1).as_usual and list(other_forward(other, broken("loss"))) == []
    (part,) = trial.ranks[1].steps[0].microbatches
    unseen = with_step(other, 1, 1, microbatches=(replace(part, loss_sum=None),))
    assert Tries(unseen, 1).observed == {} and list(other_forward(unseen, broken("loss"))) == []


def test_the_nearest_eight_are_proposed_in_noise_and_all_without(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    def near(i: int) -> Variation:
        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return (1 + i * off) * F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")

        return replace(GELU, observed=f"number {i}", loss=loss)

    def proposed(trial: Trial) -> list[str]:
        return [one.cause.observed for one in other_forward(trial, broken("loss"))]

    knowing(monkeypatch, *(near(i) for i in range(9, -1, -1)))
    off, trial = 0.0, ran(case_of(), altered=altering(GELU, FEED_FORWARD, 1))
    assert proposed(trial) == [f"number {i}" for i in range(9, -1, -1)]
    off = 1e-7
    assert proposed(with_noise(trial, loss=1e-6)) == [f"number {i}" for i in range(8)]
    far = Tries(with_noise(trial, loss=1e-6), 1).tried(near(5), FEED_FORWARD)
    assert far is not None and far.distance == pytest.approx(5e-7, rel=1e-3)


# ---- what goes into modules


def twice_as_long(block: Any) -> None:
    """GELU, and what goes into attention is twice what it should be, which nothing that follows shows."""
    GELU.alter(block.feed_forward)
    put_instead(block.attention_norm, lambda original, x: 2 * original(x))
    for name in ("wq", "wk", "wv"):
        put_instead(block.attention.get_submodule(name), lambda original, x: original(x / 2))


HIDDEN = Variation("hidden", "something else goes into attention", "", "block", twice_as_long)
AFTER_GELU = (
    "the input of layers.0.feed_forward.w3 matches the reference in mean square,"
    " but the input of layers.0.feed_forward.w2 does not"
)


def test_a_variation_that_gives_the_loss_and_other_inputs_than_were_seen_is_none(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    knowing(monkeypatch, HIDDEN, GELU)
    monkeypatch.setitem(forward.BEFORE, "w2", ["feed_forward", "block"])
    told = f"{GELU.observed}, requested SiLU"
    alter = altering(GELU, FEED_FORWARD, 1)
    trial = ran(case_of(), altered=alter)
    assert hypotheses(trial) == [(HIDDEN.observed, 1, ()), (told, 1, ())], "of which no inputs were seen"
    assert hypotheses(with_inputs(trial, alter)) == [(told, 1, (("forward", AFTER_GELU),))]
    later = with_inputs(ran(case_of(), altered=altering(GELU, FEED_FORWARD, 2)), lambda model, step: None)
    right = "the input of every module matches the reference in mean square"
    assert hypotheses(later) == [
        (f"{text} from step 2 on{expected}", 1, (("forward", right),))
        for text, expected in ((HIDDEN.observed, ""), (GELU.observed, ", requested SiLU"))
    ]


def test_on_ranks_of_their_own_inputs_are_not_compared(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    knowing(monkeypatch, GELU)
    alter = altering(GELU, FEED_FORWARD, 1)
    trial = with_inputs(ran(case_of(), altered=altering(GELU, FEED_FORWARD, 1, LAST_ROWS)), alter)
    assert hypotheses(trial) == [(f"{GELU.observed} on rank 1, requested SiLU", 2, (("forward", AFTER_GELU),))]


def test_where_all_inputs_are_right_only_what_comes_after_them_is_tried(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    knowing(monkeypatch, GELU, LOGITS)
    for one, modules, told in ((GELU, FEED_FORWARD, []), (LOGITS, [""], [LOGITS.observed])):
        trial = with_inputs(ran(case_of(), altered=altering(one, modules, 1)), lambda model, step: None)
        assert [text for text, _, _ in hypotheses(trial)] == told


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_in_which_blocks_something_may_begin_decides_what_is_found(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """In the block into which something wrong goes first, and in the one before."""
    seen = with_inputs(ran(case_of(model=LAYERS)), altering(GELU, EACH[layer : layer + 1], 1))
    knowing(monkeypatch, GELU)
    tries = Tries(seen, 1)
    asked: list[list[str]] = []
    monkeypatch.setattr(Tries, "tried", lambda self, variation, modules: asked.append(modules))
    assert list(tries.single()) == []
    near = [name for at, name in enumerate(EACH) if at in (layer - 1, layer)]
    assert asked == [one for one in (EACH, *([name] for name in EACH)) if one[0] in near]


# ---- two variations


@pytest.mark.parametrize(
    ("two", "modules", "told"),
    [(GELU, FEED_FORWARD, f"{GELU.observed}, requested SiLU"), (LOGITS, [""], LOGITS.observed)],
)
def test_two_variations_are_told_in_the_order_of_what_they_make_right(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, two: Variation, modules: list[str], told: str
) -> None:
    """One of the same name is not tried beside it, nor one whose inputs are others."""

    def doubled(module: Any) -> None:
        """What goes into w2, or the output, is twice what it should be, and they halve it."""
        two.alter(module)
        before, inner = (module.w3, module.w2) if hasattr(module, "w2") else (module.norm, module.output)
        put_instead(before, lambda original, x: 2 * original(x))
        put_instead(inner, lambda original, x: original(x / 2))

    again, hidden = replace(two, name=KEYS.name), Variation("hidden", "-", "", two.part, doubled)
    knowing(monkeypatch, again, hidden, two, KEYS, KNOWN["queries are not rotated, keys are"])
    both = _both(altering(KEYS, ATTENTION, 1), altering(two, modules, 1))
    trial = ran(case_of(), altered=both)
    assert hypotheses(trial) == [], "of which no inputs were seen"
    seen = (
        "the input of layers.0.attention.inner_attention matches the reference in mean square,"
        " but the input of layers.0.attention.wo does not"
    )
    trial = with_inputs(trial, both)
    assert hypotheses(trial) == [(f"{KEYS.observed}, requested both; {told}", 2, (("forward", seen),))]
    (found,) = Tries(trial, 1).pairs()
    assert (found.cause.kind, found.distance, found.loss) == (f"{KEYS.name}, {two.name}", 0.0, two.loss)
    assert list(Tries(trial, 2).pairs()) == []


def test_a_loss_is_one_of_two_variations(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    smooth = FAMILIES["label smoothing"].of(0.1)
    knowing(monkeypatch, KEYS, smooth)
    alter = altering(KEYS, ATTENTION, 1)
    trial = with_inputs(ran(case_of(), altered=alter, loss=smooth.loss), alter)
    told = f"{KEYS.observed}, requested both; labels are smoothed by 0.1, requested 0"
    assert [(text, numbers) for text, numbers, _ in hypotheses(trial)] == [(told, 2)]


# ---- numbers


@pytest.mark.parametrize(
    ("name", "number", "modules", "told"),
    [
        ("label smoothing", 0.07, [""], "labels are smoothed by 0.07, requested 0"),
        ("norm eps", 3e-4, ["norm"], "the norm's eps is 0.0003 in norm, requested 1e-05"),
        ("embedding scale", 3.25, ["tok_embeddings"], "embeddings are 3.25 times, requested 1"),
    ],
)
def test_a_number_is_fitted_where_no_variation_gives_the_loss(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, name: str, number: float, modules: list[str], told: str
) -> None:
    one = FAMILIES[name].of(number)
    knowing(monkeypatch, GELU, families=[FAMILIES[name]])
    trial = ran(case_of(), altered=altering(one, modules, 1), loss=one.loss)
    assert hypotheses(trial) == [(told, 2, ())]
    assert hypotheses(with_noise(trial)) == [], "in noise no number is fitted"
    knowing(monkeypatch, one, families=[FAMILIES[name]])
    assert [numbers for _, numbers, _ in hypotheses(trial)] == [1], "what is known needs no fit"


def test_a_number_that_begins_later_or_of_modules_behind_the_first_wrong_input_is_not_fitted(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale, embedding = FAMILIES["embedding scale"], ["tok_embeddings"]
    knowing(monkeypatch, families=[scale])
    alter = altering(scale.of(3.25), embedding, 1)
    trial = ran(case_of(), altered=alter)
    behind = with_inputs(trial, altering(GELU, FEED_FORWARD, 1))
    assert hypotheses(behind) == [] and len(hypotheses(with_inputs(trial, alter))) == 1
    assert hypotheses(ran(case_of(), altered=altering(scale.of(3.25), embedding, 2))) == []


def test_what_alters_the_loss_alone_is_tried_on_the_logits_that_there_are() -> None:
    asked: list[tuple[bool, object]] = []
    trial: Any = None
    tries, smooth = Tries(trial, 1), FAMILIES["label smoothing"].of(0.1)
    vars(tries)["bench"] = type("", (), {"losses": lambda self, altered, loss: asked.append((altered is None, loss))})()
    for one in (smooth, GELU, replace(smooth, alter=GELU.alter)):
        tries._losses(one, [""])
    assert asked == [(True, smooth.loss), (False, None), (False, smooth.loss)]
