"""The laws of data and numbers on literal evidence: initial_weights, samples, loss, reported_loss, gradients,
grad_norm, replica_agreement, update, determinism, golden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from literal import (
    ADAMW,
    SGD,
    UNEVEN,
    judged,
    last_bit,
    microbatch_of,
    optimize,
    tiny_case,
    trial_of,
    with_every_rank,
    with_parameter,
    with_rank,
    with_step,
    with_value,
)
from noisy import noise_of

from harness.checks import judge
from harness.checks.replica_agreement import replica_families
from harness.diagnosis import diagnose
from harness.evidence.records import Exit
from harness.judge import tolerance
from harness.judge.result import Finding, Verdict
from harness.judge.trial import Trial
from harness.plan.slices import numel
from harness.spec.dims import ParallelDims
from reference.record import Noise

EMBEDDING, NORM, WQ = "tok_embeddings.weight", "norm.weight", "layers.0.attention.wq.weight"


def findings(check: str, trial) -> tuple[Finding, ...]:
    """Those of a law that must be broken."""
    result = judged(check, trial)
    assert result.verdict == Verdict.FAIL, result
    return result.findings


def bounds_of(trial) -> tolerance.Bounds:
    return tolerance.bounds(trial.case, trial.reference)


# ---- initial_weights


def test_weights_that_are_not_the_seeds_are_named_and_their_elements_missed() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_parameter(trial, 1, NORM, value=np.ones(2))
    assert findings("initial_weights", trial) == (
        Finding(f"rank 1, {NORM}", "a slice of the seed weight", "other values"),
        Finding(NORM, "all 4 elements held by some rank", "2 of them held by no rank"),
    )


def test_weights_off_by_their_last_bit_on_one_replica_are_named() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    trial = with_parameter(trial, 3, NORM, value=last_bit(trial.ranks[3].parameters[-2].value))
    assert findings("initial_weights", trial) == (
        Finding(f"rank 3, {NORM}", "a slice of the seed weight", "other values"),
    )


def test_rows_that_nobody_holds_are_counted() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_parameter(trial, 1, EMBEDDING, value=trial.ranks[0].parameters[0].value)
    assert findings("initial_weights", trial) == (
        Finding(EMBEDDING, "all 32 elements held by some rank", "16 of them held by no rank"),
    )


# ---- samples


def feeding(trial, rank: int, step: int, *ids: list[int]):
    """The trial with a rank received these samples, one list a microbatch."""
    microbatches = tuple(microbatch_of(trial.reference, part) for part in ids)
    return with_step(trial, rank, step, microbatches=microbatches)


def test_two_ranks_fed_the_same_samples_are_named() -> None:
    assert findings("samples", feeding(trial_of(tiny_case("ddp_2")), 1, 1, [0, 1, 2, 3])) == (
        Finding(
            "step 1",
            "each of 8 samples received by one dp rank",
            "4 received more than once (0, 1, 2, 3); 4 received by nobody (4, 5, 6, 7); ranks [0, 1] received the same",
        ),
    )


def test_a_tp_peer_fed_other_samples_is_named() -> None:
    trial = feeding(trial_of(tiny_case("fsdp_2_tp_2")), 3, 3, [20, 21, 22, 16])
    assert findings("samples", trial) == (
        Finding("rank 3, step 3", "the samples of tp peer 2: [20, 21, 22, 23]", "[20, 21, 22, 16]"),
    )


def test_samples_of_the_next_step_are_named() -> None:
    assert findings("samples", feeding(trial_of(tiny_case("single")), 0, 2, list(range(9, 17)))) == (
        Finding(
            "step 2",
            "each of 8 samples received by one dp rank",
            "1 received by nobody (8); 1 of another step (16)",
        ),
    )


def test_tokens_that_are_no_sample_are_counted() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    (microbatch,) = trial.ranks[1].steps[2].microbatches
    shifted = replace(microbatch, tokens=np.roll(microbatch.tokens, 1, axis=1))
    shown = findings("samples", with_step(trial, 1, 3, microbatches=(shifted,)))
    assert sorted(finding.where for finding in shown) == ["rank 1, step 3", "step 3"]


def test_labels_that_are_not_shifted_are_counted() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    (microbatch,) = trial.ranks[1].steps[2].microbatches
    labels = microbatch.labels.copy()
    labels[0, :2] = 99
    assert findings("samples", with_step(trial, 1, 3, microbatches=(replace(microbatch, labels=labels),))) == (
        Finding("rank 1, step 3", "each sample's own labels", "2 labels differ"),
    )


def test_accumulation_that_did_not_take_place_is_named() -> None:
    asked, ran = tiny_case("single", accumulation=2), tiny_case("single")
    assert findings("samples", trial_of(asked, ran)) == tuple(
        Finding(f"rank 0, step {step}", "microbatches of [4, 4] samples", "[8]") for step in (1, 2, 3)
    )


def test_an_uneven_split_over_ranks_is_named() -> None:
    trial = feeding(trial_of(tiny_case("ddp_2")), 0, 1, [0, 1, 2, 3, 4])
    trial = feeding(trial, 1, 1, [5, 6, 7])
    assert findings("samples", trial) == (
        Finding("rank 0, step 1", "microbatches of [4] samples", "[5]"),
        Finding("rank 1, step 1", "microbatches of [4] samples", "[3]"),
    )


def test_a_sample_fed_twice_beside_all_the_others_is_named() -> None:
    assert findings("samples", feeding(trial_of(tiny_case("ddp_2")), 1, 1, [4, 5, 6, 7, 0])) == (
        Finding("step 1", "each of 8 samples received by one dp rank", "1 received more than once (0)"),
        Finding("rank 1, step 1", "microbatches of [4] samples", "[5]"),
    )


def test_a_step_without_any_microbatch_does_not_pass() -> None:
    trial = with_step(trial_of(tiny_case("ddp_2")), 1, 2, microbatches=())
    assert findings("samples", trial)[-1] == Finding("rank 1, step 2", "microbatches of [4] samples", "[]")


# ---- loss, reported_loss, grad_norm


def with_loss(trial, rank: int, step: int, change):
    microbatches = trial.ranks[rank].steps[step - 1].microbatches
    changed = tuple(replace(m, loss_sum=change(m.loss_sum)) for m in microbatches)
    return with_step(trial, rank, step, microbatches=changed)


def test_a_local_loss_off_by_1e_8_in_the_last_step_of_the_last_rank_is_found() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    expected = trial.reference.steps[2].loss
    (finding,) = findings("loss", with_loss(trial, 1, 3, lambda loss: loss * (1 + 1e-8)))
    bound = f"{bounds_of(trial).loss[3]:.1e}"
    assert (finding.where, finding.expected, finding.bound) == ("step 3", repr(expected), bound)
    (part,), (other,) = (trial.ranks[rank].steps[2].microbatches for rank in (1, 0))
    share = part.loss_sum / (part.loss_sum + other.loss_sum)
    assert finding.observed.endswith(f"(off by {1e-8 * share:.2e})"), finding


def test_a_loss_rounded_to_float32_is_found() -> None:
    trial = with_loss(trial_of(tiny_case("single")), 0, 1, lambda loss: float(np.float32(loss)))
    assert [finding.where for finding in findings("loss", trial)] == ["step 1"]


def test_a_loss_that_is_not_a_number_is_found() -> None:
    trial = trial_of(tiny_case("single"))
    (finding,) = findings("loss", with_loss(trial, 0, 2, lambda _: float("nan")))
    assert (finding.where, finding.observed) == ("step 2", "nan (off by inf)")


def test_a_tp_peer_that_computed_another_loss_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2"))
    (received,) = trial.ranks[2].steps[2].microbatches
    assert findings("loss", with_loss(trial, 3, 3, lambda loss: 2 * loss)) == (
        Finding(
            "rank 3, step 3",
            f"tp peer 2's for the same tokens: {received.loss_sum!r} over {received.valid_tokens}",
            f"{2 * received.loss_sum!r} over {received.valid_tokens}",
            f"{bounds_of(trial).loss[3]:.1e}",
        ),
    )


def test_losses_that_nobody_saw_are_unknown() -> None:
    trial = with_every_rank(trial_of(tiny_case("fsdp_2")), lambda t, rank: with_loss(t, rank, 2, lambda _: None))
    result = judged("loss", trial)
    call = 'harness.probe.losses.note_loss(labels, loss, reduction="sum")'
    remedy = f"let the adapter of llama3 call `{call}` where it is computed"
    assert result.verdict is Verdict.UNKNOWN
    assert result.note.startswith(f"step 2: no rank's loss was seen; {remedy}, if not by torch's cross_entropy")


@pytest.mark.parametrize(("check", "field"), [("reported_loss", "reported_loss"), ("grad_norm", "grad_norm")])
class TestWhatIsDisplayed:
    def shown(self, trial, rank, step, field, value):
        return with_step(trial, rank, step, **{field: value})

    def test_a_curve_shifted_by_one_step_is_found_in_every_step(self, check: str, field: str) -> None:
        trial = trial_of(tiny_case("single"))
        curve = [getattr(step, field) for step in trial.ranks[0].steps]
        for step, value in zip((1, 2, 3), (*curve[1:], curve[-1]), strict=True):
            trial = self.shown(trial, 0, step, field, value)
        assert [finding.where for finding in findings(check, trial)] == ["rank 0, step 1", "rank 0, step 2"]

    def test_only_the_last_rank_wrong_in_only_the_last_step_is_found(self, check: str, field: str) -> None:
        trial = trial_of(tiny_case("hsdp_2x2"))
        value = getattr(trial.ranks[3].steps[2], field)
        broken = self.shown(trial, 3, 3, field, value * (1 + 1e-8))
        (finding,) = findings(check, broken)
        assert (finding.where, finding.expected) == ("rank 3, step 3", repr(value))

    def test_a_value_rounded_to_float32_is_found(self, check: str, field: str) -> None:
        trial = trial_of(tiny_case("single"))
        value = float(np.float32(getattr(trial.ranks[0].steps[0], field)))
        assert len(findings(check, self.shown(trial, 0, 1, field, value))) == 1

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
    def test_what_is_no_number_is_found(self, check: str, field: str, value: float) -> None:
        (finding,) = findings(check, self.shown(trial_of(tiny_case("single")), 0, 3, field, value))
        assert finding.observed.startswith(repr(value))

    def test_a_rank_that_displays_nothing_claims_nothing(self, check: str, field: str) -> None:
        trial = trial_of(tiny_case("fsdp_2"))
        for step in (1, 2, 3):
            trial = self.shown(trial, 1, step, field, None)
        assert (judged(check, trial).verdict, judged(check, trial).examined) == (Verdict.PASS, 3)

    def test_a_rank_that_displays_some_steps_and_not_others_is_found(self, check: str, field: str) -> None:
        trial = self.shown(trial_of(tiny_case("fsdp_2")), 1, 2, field, None)
        (finding,) = findings(check, trial)
        assert (finding.where, finding.observed) == ("rank 1, step 2", "none reported")

    def test_a_trainer_that_displays_every_second_step_owes_no_others(self, check: str, field: str) -> None:
        trial = with_every_rank(trial_of(tiny_case("fsdp_2")), lambda t, rank: with_rank(t, rank, reports_every=2))
        for rank, step in ((0, 1), (0, 3), (1, 3)):
            trial = self.shown(trial, rank, step, field, None)
        assert (judged(check, trial).verdict, judged(check, trial).examined) == (Verdict.PASS, 3)
        (finding,) = findings(check, self.shown(trial, 1, 2, field, None))
        assert finding.where == "rank 1, step 2" and finding.expected.endswith("as in step 1")

    def test_a_trainer_that_displays_after_the_last_step_only_claims_nothing_here(self, check: str, field: str) -> None:
        trial = with_rank(trial_of(tiny_case("single")), 0, reports_every=10)
        for step in (1, 2, 3):
            trial = self.shown(trial, 0, step, field, None)
        assert judged(check, trial).verdict is Verdict.NOT_APPLICABLE
        assert judged(check, trial).note == "this trainer reports every 10 steps, and steps 1 to 3 have none"

    def test_if_no_rank_displays_anything_nothing_is_known(self, check: str, field: str) -> None:
        trial = trial_of(tiny_case("single"))
        for step in (1, 2, 3):
            trial = self.shown(trial, 0, step, field, None)
        assert judged(check, trial).verdict is Verdict.UNKNOWN


def with_rates(rate: Callable[[float, float], float | None]) -> Trial:
    """rate: what is reported, of the optimizer's rate of this step and of the next."""
    trial = trial_of(tiny_case("fsdp_2"))
    rates = [step.lr for step in trial.reference.steps]
    for rank in trial.ranks:
        for step, (now, after) in enumerate(zip(rates, (*rates[1:], 0.0), strict=True), start=1):
            trial = with_step(trial, rank, step, reported_lr=rate(now, after))
    return trial


def test_a_rate_displayed_in_float32_is_right_and_one_of_the_next_step_is_not() -> None:
    assert judged("reported_rate", with_rates(lambda now, after: float(np.float32(now)))).verdict is Verdict.PASS
    broken = findings("reported_rate", with_rates(lambda now, after: after))
    assert [finding.where for finding in broken] == [f"rank {rank}, step {n}" for rank in (0, 1) for n in (1, 2, 3)]
    assert ", the optimizer took " in broken[0].expected


def test_a_displayed_rate_that_is_the_recipes_and_not_the_optimizers_is_found() -> None:
    trial = with_step(with_rates(lambda now, after: now), 1, 2, lr=0.5)
    (finding,) = findings("reported_rate", trial)
    assert finding.where == "rank 1, step 2" and finding.expected.endswith(", the optimizer took 0.5")


def test_a_rate_that_is_no_number_is_found_and_one_that_nobody_displays_is_not_judged() -> None:
    assert len(findings("reported_rate", with_rates(lambda now, after: float("nan")))) == 6
    assert judged("reported_rate", with_rates(lambda now, after: None)).verdict is Verdict.NOT_APPLICABLE
    promised = with_every_rank(
        with_rates(lambda now, after: None), lambda t, rank: with_rank(t, rank, reports=("loss", "lr"))
    )
    assert judged("reported_rate", promised).verdict is Verdict.UNKNOWN


def test_a_norm_twice_too_large_shows_its_ratio() -> None:
    trial = trial_of(tiny_case("single"))
    norm = trial.reference.steps[0].grad_norm
    assert findings("grad_norm", with_step(trial, 0, 1, grad_norm=2 * norm)) == (
        Finding("rank 0, step 1", repr(norm), f"{2 * norm!r} (ratio 2)", f"{bounds_of(trial).gradient[1]:.1e}"),
    )


# ---- gradients


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("training", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_a_gradient_scaled_by_one_and_1e_8_is_found(step: int, training) -> None:
    trial = trial_of(tiny_case("hsdp_2x2", training))
    part = trial.ranks[3].steps[step - 1].gradients[WQ]
    largest = np.abs(part).max() / np.abs(trial.reference.steps[step - 1].gradients[WQ]).max()
    assert findings("gradients", with_value(trial, 3, step, "gradients", WQ, lambda g: g * (1 + 1e-8))) == (
        Finding(
            f"rank 3, step {step}, {WQ}",
            "the reference's",
            f"off by {1e-8 * largest:.2e} of the largest entry",
            f"{bounds_of(trial).gradient[step]:.1e}",
        ),
    )


@pytest.mark.parametrize(
    ("change", "off"),
    [
        (lambda g: g * np.nan, "inf"),
        (lambda g: np.where(np.arange(g.size).reshape(g.shape) == 3, np.nan, g), "inf"),
        (lambda g: g[:1], "inf"),
        (lambda g: g.reshape(-1), "inf"),
    ],
    ids=["NaN", "one NaN", "too few rows", "flat"],
)
def test_a_gradient_that_cannot_be_compared_is_infinitely_far(change, off: str) -> None:
    (finding,) = findings("gradients", with_value(trial_of(tiny_case("fsdp_2")), 1, 3, "gradients", WQ, change))
    assert finding.observed == f"off by {off} of the largest entry"


@pytest.mark.parametrize(
    "change",
    [lambda g: g.astype(np.float32), lambda g: 0 * g, lambda g: -g, lambda g: g[::-1]],
    ids=["rounded to float32", "zero", "negated", "rows in another order"],
)
def test_a_gradient_that_is_another_is_found(change) -> None:
    trial = with_value(trial_of(tiny_case("fsdp_2")), 1, 3, "gradients", WQ, change)
    assert [finding.where for finding in findings("gradients", trial)] == [f"rank 1, step 3, {WQ}"]


def test_the_worst_gradient_is_shown_first() -> None:
    trial = with_value(trial_of(tiny_case("fsdp_2")), 0, 1, "gradients", WQ, lambda g: 1.001 * g)
    trial = with_value(trial, 1, 3, "gradients", NORM, lambda g: 5 * g)
    where = [finding.where for finding in findings("gradients", trial)]
    assert where == [f"rank 1, step 3, {NORM}", f"rank 0, step 1, {WQ}"]


# ---- replica_agreement


@pytest.mark.parametrize("what", ["gradients", "parameters"])
def test_a_replica_that_differs_in_its_last_bit_is_found(what: str) -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    value = getattr(trial.ranks[1].steps[2], what)[WQ]
    away = np.abs(last_bit(value) - value).max() / np.abs(value).max()
    assert 0 < away < 3e-16
    assert findings("replica_agreement", with_value(trial, 3, 3, what, WQ, last_bit)) == (
        Finding(
            f"step 3, {what} of {WQ}, ranks [1,3]",
            "the bytes of rank 1",
            f"rank 3 differs by {away:.2e} of the largest entry",
        ),
    )


def test_tensor_parallel_norms_are_replicas_too() -> None:
    trial = with_value(trial_of(tiny_case("tp_2")), 1, 1, "gradients", NORM, lambda g: 3 * g)
    (finding,) = findings("replica_agreement", trial)
    assert (finding.where, finding.expected) == (f"step 1, gradients of {NORM}, ranks [0,1]", "the bytes of rank 0")


def test_replicas_are_of_what_has_a_place_in_the_model_and_is_not_empty() -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_replicate=2, dp_shard=4), model=UNEVEN))  # the fourth shards are empty
    assert [t.fqn for t in trial.ranks[3].parameters if not t.value.size]
    assert all(numel(part) for _, part in replica_families(trial))
    for rank, evidence in trial.ranks.items():
        buffer = replace(evidence.parameters[0], fqn="a.buffer", value=np.ones(3))
        trial = with_rank(trial, rank, parameters=(*evidence.parameters, buffer))
    assert "a.buffer" not in {fqn for fqn, _ in replica_families(trial)}
    assert judged("replica_agreement", trial).verdict == Verdict.PASS


def test_how_far_a_replica_is_from_one_that_is_zero_is_told_as_it_is() -> None:
    trial = with_value(trial_of(tiny_case("ddp_2")), 0, 1, "gradients", NORM, np.zeros_like)
    trial = with_value(trial, 1, 1, "gradients", NORM, lambda g: np.full_like(g, 0.5))
    assert findings("replica_agreement", trial)[0].observed == "rank 1 differs by 5.00e-01 of the largest entry"


def test_a_replica_without_a_gradient_does_not_agree() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    rest = {fqn: g for fqn, g in trial.ranks[1].steps[0].gradients.items() if fqn != WQ}
    assert findings("replica_agreement", with_step(trial, 1, 1, gradients=rest)) == (
        Finding(
            f"step 1, gradients of {WQ}, ranks [0,1]",
            "the bytes of rank 0",
            "rank 1 differs by having one, where the other has none",
        ),
    )


def test_replicas_that_hold_other_slices_than_planned_were_not_compared() -> None:
    result = judged("replica_agreement", trial_of(tiny_case("ddp_2"), tiny_case("fsdp_2")))
    assert result.verdict == Verdict.UNKNOWN
    assert result.note.startswith(
        f"ranks [0,1] should hold the same slice of {EMBEDDING} and do not (12 of 12 such slices)"
    )


def test_replicas_are_not_judged_where_the_plan_has_none() -> None:
    assert judged("replica_agreement", trial_of(tiny_case("fsdp_2"))).verdict == Verdict.NOT_APPLICABLE


@pytest.mark.parametrize(
    "labels", [None, np.zeros(3, np.int64), np.zeros((8, 3), np.int64)], ids=["none", "few", "short"]
)
def test_labels_that_are_not_one_a_token_are_not_passed_over(labels: np.ndarray | None) -> None:
    trial = trial_of(tiny_case("single"))
    (microbatch,) = trial.ranks[0].steps[1].microbatches
    trial = with_step(trial, 0, 2, microbatches=(replace(microbatch, labels=labels),))
    observed = f"[{0 if labels is None else labels.size}] labels"
    assert findings("samples", trial) == (
        Finding("rank 0, step 2", "labels for microbatches of [32] tokens", observed),
    )


def test_a_tp_peer_that_computes_fewer_losses_is_found() -> None:
    trial = trial_of(tiny_case("tp_2"))
    (microbatch,) = trial.ranks[1].steps[1].microbatches
    silent = replace(microbatch, labels=None, loss_sum=None, valid_tokens=None)
    assert findings("loss", with_step(trial, 1, 2, microbatches=(silent,))) == (
        Finding("rank 1, step 2", "tp peer 0's for the same tokens: 1 losses", "0"),
    )


# ---- update


def test_a_parameter_that_an_optimizer_forgot_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    start = trial.ranks[1].parameters[-2].value
    assert findings("update", with_value(trial, 1, 1, "parameters", NORM, lambda _: start))[0] == Finding(
        f"rank 1, step 1, {NORM}", "moved by the optimizer", "not changed at all"
    )


def trained_as(trial, training, coefficient: float = 1.0):
    """The trial with parameters made of the same gradients by another recipe, or other clipping."""

    def change(trial, rank):
        for tensor in trial.ranks[rank].parameters:
            clips = [tolerance.clip_coefficient(s.grad_norm, training.max_norm) for s in trial.reference.steps]
            for step in (1, 2, 3):
                steps = zip(clips, trial.ranks[rank].steps[:step], strict=False)
                seen = [clip * coefficient * s.gradients[tensor.fqn] for clip, s in steps]
                after = optimize(tensor.value, seen, training)[0]
                trial = with_value(trial, rank, step, "parameters", tensor.fqn, lambda _, after=after: after)
        return trial

    return with_every_rank(trial, change)


WRONG_RECIPES = {
    "weight decay left out": {"weight_decay": 0.0},
    "weight decay off by 1e-6": {"weight_decay": 0.1 * (1 + 1e-6)},
    "no clipping": {"max_norm": None},
    "another beta1": {"beta1": 0.95},
    "another beta2": {"beta2": 0.999},
    "another eps": {"eps": 1e-6},
    "another learning rate": {"lr": 0.01 * (1 + 1e-8)},
}


@pytest.mark.parametrize("mistake", WRONG_RECIPES)
def test_another_recipe_than_the_one_asked_for_is_found(mistake: str) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    assert judged("update", trained_as(trial, trial.case.training)).verdict == Verdict.PASS
    broken = trained_as(trial, replace(trial.case.training, **WRONG_RECIPES[mistake]))
    assert {finding.where.split(",")[0] for finding in findings("update", broken)} >= {"rank 0"}


def test_norm_weights_that_decay_although_only_matrices_should_are_found() -> None:
    trial = trial_of(tiny_case("fsdp_2", replace(ADAMW, decay="matrices")))
    wrong = findings("update", trained_as(trial, ADAMW))
    assert {finding.where.split(", ")[2] for finding in wrong} == {fqn for fqn in trial.plan.shapes if "norm" in fqn}


def test_samples_in_full_length_in_a_step_that_trains_on_half_are_found() -> None:
    asked, ran = (tiny_case("fsdp_2", replace(ADAMW, variable_length=half)) for half in (True, False))
    assert {finding.where.split("step ")[1] for finding in findings("samples", trial_of(asked, ran))} == {"2"}


def test_a_gradient_of_another_shape_than_its_parameter_is_a_finding_and_can_be_diagnosed() -> None:
    """As where each tp rank has the whole gradient of its part of an embedding."""
    trial = trial_of(tiny_case("fsdp_2", replace(ADAMW, max_norm=None)))
    broken = with_value(trial, 0, 1, "gradients", NORM, lambda value: np.tile(value, 2))
    told = Finding(f"rank 0, step 1, gradient of {NORM}", "shape (2,)", "shape (4,)")
    assert told in findings("update", broken)
    diagnosis = diagnose(broken, judge(broken))
    assert diagnosis is not None and NORM in diagnosis.cause


def test_sgd_without_clipping_shows_the_ratio() -> None:
    trial = trial_of(tiny_case("single", replace(SGD, weight_decay=0.0)))
    broken = trained_as(trial, replace(trial.case.training, max_norm=None))
    ratios = [float(f.observed.split("(ratio ")[1].split(")")[0]) for f in findings("update", broken)[:8]]
    assert ratios == pytest.approx([1 / tolerance.clip_coefficient(trial.reference.steps[0].grad_norm, 1.0)] * 8)


def test_clipping_by_one_ranks_own_norm_is_found() -> None:
    broken = trained_as(trial_of(tiny_case("fsdp_2", SGD)), SGD, coefficient=1.4)
    assert judged("update", broken).verdict == Verdict.FAIL


def test_a_parameter_moved_though_it_should_rest_is_a_failure_not_an_error() -> None:
    """SGD without decay leaves rows without gradient alone: the ratio would divide by zero."""
    trial = trial_of(tiny_case("single", replace(SGD, weight_decay=0.0, max_norm=None)))
    start = trial.ranks[0].parameters[-2].value
    for step in (1, 2, 3):
        trial = with_value(trial, 0, step, "gradients", NORM, np.zeros_like)
        trial = with_value(trial, 0, step, "parameters", NORM, lambda _: start)
    trial = with_value(trial, 0, 1, "parameters", NORM, lambda value: value + np.array([0, 0, 0.5, 0]))
    (finding,) = findings("update", trial)
    assert finding.where == f"rank 0, step 1, {NORM}"
    assert finding.expected == "entry (2,) moved by 0"
    assert finding.observed == "moved by 0.5 (ratio inf); 1 of 4 entries wrong"


def test_a_wrong_learning_rate_is_named() -> None:
    assert findings("update", with_step(trial_of(tiny_case("fsdp_2")), 1, 3, lr=0.0076)) == (
        Finding("rank 1, step 3, learning rate", "0.0075", "0.0076"),
    )


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_wrong_optimizer_state_after_the_last_step_is_named(key: str) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    state = trial.ranks[1].steps[2].optimizer_state
    wrong = state | {WQ: state[WQ] | {key: state[WQ][key] * (1 + 1e-8)}}
    assert findings("update", with_step(trial, 1, 3, optimizer_state=wrong)) == (
        Finding(f"rank 1, step 3, {WQ}, {key}", "the optimizer's average of the gradients seen", "another value"),
    )


def test_parameters_rounded_to_float32_are_found() -> None:
    trial = with_value(trial_of(tiny_case("fsdp_2")), 1, 3, "parameters", WQ, lambda p: p.astype(np.float32))
    assert [finding.where for finding in findings("update", trial)] == [f"rank 1, step 3, {WQ}"]


def test_a_parameter_that_is_changed_after_the_optimizer_is_not_the_optimizers_mistake() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    left = trial.ranks[1].steps[0].parameters[NORM]
    trial = with_step(trial, 1, 1, changed={NORM: left + np.array([0.0, 0.5])})
    expected = Finding(
        f"rank 1, step 1, {NORM}", "left alone between steps 1 and 2", "1 of 2 entries changed, by up to 0.5"
    )
    assert findings("update", trial) == (expected,)


def test_a_parameter_that_is_changed_after_the_last_step_is_seen() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    left = trial.ranks[0].steps[2].parameters[NORM]
    trial = with_step(trial, 0, 3, changed={NORM: left.astype(np.float32)})
    expected = Finding(f"rank 0, step 3, {NORM}", "left alone after the last step", "float64 (4,) became float32 (4,)")
    assert findings("update", trial) == (expected,)


def test_without_a_look_at_what_followed_a_step_its_update_is_unknown() -> None:
    result = judged("update", with_step(trial_of(tiny_case("ddp_2")), 1, 2, changed=None))
    assert (result.verdict, result.note) == (Verdict.UNKNOWN, "nobody looked at parameters between steps 2 and 3")


# ---- determinism


def repeated(trial, change=lambda trial: trial):
    return replace(trial, repeat=change(trial).run)


def test_a_repeat_that_differs_in_one_bit_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    broken = repeated(trial, lambda t: with_value(t, 1, 3, "gradients", WQ, last_bit))
    assert findings("determinism", broken) == (
        Finding("rank 1, step 3", "the bytes of the first run", f"1 differ: gradients of {WQ}"),
    )
    broken = repeated(trial, lambda t: with_loss(t, 0, 1, lambda loss: np.nextafter(loss, 9)))
    assert findings("determinism", broken) == (
        Finding("rank 0, step 1", "the bytes of the first run", "1 differ: loss of microbatch 0"),
    )


def test_a_repeat_that_failed_or_is_not_there_is_unknown() -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    crashed = replace(trial.run, exits=(Exit(0, "ok", 0), Exit(1, "raised", 1)))
    fewer = replace(trial.run, ranks={0: trial.ranks[0]})
    for repeat in (None, crashed, fewer):
        result = judged("determinism", replace(trial, repeat=repeat))
        assert (result.verdict, result.note) == (Verdict.UNKNOWN, "the repeat left no complete evidence")


def test_a_repeat_with_a_step_less_is_unknown() -> None:
    trial = trial_of(tiny_case("single", runs=2))
    shorter = repeated(trial, lambda t: with_rank(t, 0, steps=t.ranks[0].steps[:2]))
    assert judged("determinism", shorter).verdict == Verdict.UNKNOWN


# ---- golden


def test_a_reference_that_moved_away_from_its_golden_is_named() -> None:
    trial = trial_of(tiny_case("single"))
    loss = trial.golden.losses[2]
    moved = replace(trial.golden, losses=(*trial.golden.losses[:2], loss * (1 + 1e-8)))
    assert findings("golden", replace(trial, golden=moved)) == (
        Finding(
            "step 3, loss",
            f"{moved.losses[2]!r} (golden)",
            f"{loss!r} (reference)",
            f"{bounds_of(trial).loss[3]:.1e}",
        ),
    )


def test_a_golden_of_another_number_of_steps_is_named() -> None:
    trial = trial_of(tiny_case("single"))
    longer = replace(trial.golden, losses=(*trial.golden.losses, 1.0), grad_norms=(*trial.golden.grad_norms, 1.0))
    assert findings("golden", replace(trial, golden=longer)) == (
        Finding("number of steps", "4 (golden)", "3 (reference)"),
    )


def test_a_golden_that_is_no_number_never_passes() -> None:
    trial = trial_of(tiny_case("single"))
    nothing = replace(trial.golden, grad_norms=(float("nan"),) * 3)
    assert [f.where for f in findings("golden", replace(trial, golden=nothing))] == [
        "step 1, gradient norm",
        "step 2, gradient norm",
        "step 3, gradient norm",
    ]


def test_a_missing_golden_is_unknown_with_the_remedy() -> None:
    result = judged("golden", replace(trial_of(tiny_case("single")), golden=None, golden_problem="make one"))
    assert (result.verdict, result.note) == (Verdict.UNKNOWN, "make one")


def test_a_case_of_no_file_has_no_golden() -> None:
    result = judged("golden", trial_of(tiny_case("single", file="")))
    note = "the case is in no file (it was given another seed or dtype), so it has no golden"
    assert (result.verdict, result.note) == (Verdict.NOT_APPLICABLE, note)


# ---- the measured tier: any case that is not float64 throughout

QUIET = noise_of(tiny_case("single"))
MEASURED = ("grad_norm", "gradients", "loss", "reported_loss")


def inexact(noise: dict[str, Noise]) -> Trial:
    trial = trial_of(tiny_case("fsdp_2", reduce_dtype="bfloat16"))
    assert trial.golden is not None
    return replace(trial, golden=replace(trial.golden, noise=noise))


@pytest.mark.parametrize("check", [*MEASURED, "golden"])
def test_without_measured_noise_a_law_is_unknown_and_says_how_to_measure_it(check: str) -> None:
    result = judged(check, inexact({}))
    assert (result.verdict, result.note) == (
        Verdict.UNKNOWN,
        "no bound: the noise of this recipe's reference was never measured;"
        " `harness golden --accept -k tiny` measures it",
    )


@pytest.mark.parametrize("check", MEASURED)
def test_with_measured_noise_a_correct_run_passes(check: str) -> None:
    assert judged(check, inexact({"bfloat16 shares": QUIET})).verdict is Verdict.PASS


def test_the_golden_law_allows_for_kernels_that_sum_in_another_order() -> None:
    assert judged("golden", inexact({"bfloat16 parts": QUIET})).verdict is Verdict.PASS


def test_a_gradient_beyond_the_measured_bound_shows_where_the_bound_comes_from() -> None:
    trial = with_value(inexact({"bfloat16 shares": QUIET}), 1, 2, "gradients", WQ, lambda g: g * (1 + 1e-5))
    result = judged("gradients", trial)
    assert result.verdict is Verdict.FAIL
    assert result.findings[0].bound == "4.0e-09: 4 x the spread of 16 repeats of the reference"
