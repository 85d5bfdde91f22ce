"""Where forward goes wrong: the lengths of what goes into each module, over all ranks, beside those of one device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from literal import judged, tiny_case, trial_of, with_step, with_step_1_gradients
from noisy import with_noise

from harness.checks import judge
from harness.diagnosis import diagnose
from harness.diagnosis.engine import failing_checks
from harness.diagnosis.localise import first_wrong_input, localise
from harness.judge.trial import Trial
from harness.probe.activity import ActivityRecorder
from harness.probe.clock import Clock
from harness.reference.config import ModelConfig
from harness.reference.model import initial_weights, llama_from
from harness.reference.train import mean_squares
from harness.report.cause_text import cause_line, diagnosis_line, evidence_rows

INPUTS = {"layers.0": 4.0, "layers.0.attention.wq": 1.0, "layers.0.attention.wo": 0.25, "norm": 9.0}


def wrong_forward(seen: dict[str, tuple[float, float]], rank: int = 1, layout: str = "tp_2") -> Trial:
    """Losses and gradients are wrong in no way that a rule knows; one rank tells other lengths."""
    trial = trial_of(tiny_case(layout))
    noise = np.random.default_rng(1)
    trial = with_step_1_gradients(
        trial, lambda _, fqn: trial.reference.steps[0].gradients[fqn] + noise.standard_normal(trial.plan.shapes[fqn])
    )
    for peer in trial.ranks:
        (part,) = trial.ranks[peer].steps[0].microbatches
        told = {fqn: (8 * square, 8.0) for fqn, square in INPUTS.items()} | (seen if peer == rank else {})
        activity = replace(trial.ranks[peer].steps[0].activity, inputs=told)
        worse = replace(part, loss_sum=1.01 * part.loss_sum)
        trial = with_step(trial, peer, 1, activity=activity, microbatches=(worse,))
    return replace(trial, reference=replace(trial.reference, inputs=INPUTS))


def cause(trial: Trial) -> str:
    found = diagnose(trial, judge(trial))
    assert found is not None
    told = dict(evidence_rows(found.evidence)).get("still failing", diagnosis_line(found))
    return told.partition("samples are right")[2]


def test_the_first_module_into_which_something_of_another_length_goes_is_named() -> None:
    assert cause(wrong_forward({"layers.0.attention.wo": (2.01, 8.0), "norm": (80.0, 8.0)})) == (
        ": the input of layers.0.attention.wq matches the reference in mean square,"
        " but the input of layers.0.attention.wo does not"
    )


def test_a_difference_of_one_part_in_1e_8_on_one_rank_is_enough() -> None:
    assert cause(wrong_forward({"norm": (72 * (1 + 1e-8), 8.0)})) == (
        ": the input of layers.0.attention.wo matches the reference in mean square, but the input of norm does not"
    )


RIGHT = (
    ": the input of every module matches the reference in mean square;"
    " the output or the loss may be computed otherwise, or something that keeps it"
)
AT_NORM = ": the input of layers.0.attention.wo matches the reference in mean square, but the input of norm does not"


def located(trial: Trial) -> str:
    found, _ = localise(trial, {check: judged(check, trial) for check in ("loss", "gradients")}, 0)
    return cause_line(found).removeprefix("the forward pass is wrong: the loss of step 1 is off by 1.0e-02")


def test_a_difference_of_a_few_parts_in_1e_10_is_rounding() -> None:
    for off, told in ((1e-10, RIGHT), (1e-8, AT_NORM)):
        assert located(wrong_forward({"norm": (72 * (1 + off), 8.0)})) == told


def test_in_recipes_with_noise_a_difference_of_a_few_times_what_is_allowed_of_the_first_loss_is_noise() -> None:
    for off, told in ((2e-4, RIGHT), (1e-3, RIGHT), (1e-2, AT_NORM)):
        trial = with_noise(wrong_forward({"norm": (72 * (1 + off), 8.0)}), loss=1e-4)
        noise = trial.golden.noise[trial.case.noise_key]
        noise = replace(noise, loss=(noise.loss[0], 1.0, 1.0))
        trial = replace(trial, golden=replace(trial.golden, noise={trial.case.noise_key: noise}))
        assert located(trial) == told


def test_attention_itself_is_named_where_what_goes_into_it_is_right_and_what_comes_out_is_not() -> None:
    inner = "layers.0.attention.inner_attention"
    trial = wrong_forward({"layers.0.attention.wo": (2.01, 8.0)})
    trial = replace(trial, reference=replace(trial.reference, inputs={inner: 1.0, "layers.0.attention.wo": 0.25}))
    for rank in trial.ranks:
        activity = trial.ranks[rank].steps[0].activity
        trial = with_step(trial, rank, 1, activity=replace(activity, inputs=activity.inputs | {inner: (8.0, 8.0)}))
    assert cause(trial) == (
        f": the input of {inner} matches the reference in mean square, but"
        " the input of layers.0.attention.wo does not, where a wrong rotation of queries and keys would not show"
    )


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        ("layers.0.ffn_norm", "the input of layers.0.ffn_norm"),
        ("layers.0.ffn_dropout", "the output of layers.0.feed_forward"),
        ("layers.0.attention_dropout", "the output of layers.0.attention"),
    ],
)
def test_tp_ranks_that_do_not_have_one_sum_are_named_where_it_first_goes_wrong(gives: str, words: str) -> None:
    trial, inputs = wrong_forward({gives: (16.0, 8.0)}), INPUTS | {gives: 4.0}
    for rank, squares in ((0, 24.0), (1, 16.0)):
        activity = trial.ranks[rank].steps[0].activity
        trial = with_step(trial, rank, 1, activity=replace(activity, inputs={**activity.inputs, gives: (squares, 8.0)}))
    wrong = replace(trial, reference=replace(trial.reference, inputs=inputs))
    apart = f"{words} does not, and differs among tp ranks [0,1], which should have the same sum"
    assert first_wrong_input(without_sequence_parallel(wrong)).endswith(apart)
    assert first_wrong_input(wrong).endswith(f"{words} does not")  # each has its part of the sequence
    activity = trial.ranks[0].steps[0].activity
    close = with_step(
        wrong, 0, 1, activity=replace(activity, inputs={**activity.inputs, gives: (16 * (1 + 1e-7), 8.0)})
    )
    assert first_wrong_input(without_sequence_parallel(close)).endswith(f"{words} does not")  # but for rounding


def test_tp_ranks_that_have_one_sum_and_those_that_have_none_do_not_differ() -> None:
    gives, told = "layers.0.ffn_norm", "the input of layers.0.ffn_norm does not"
    trial = wrong_forward({gives: (16.0, 8.0)})
    wrong = without_sequence_parallel(replace(trial, reference=replace(trial.reference, inputs=INPUTS | {gives: 4.0})))
    assert first_wrong_input(wrong).endswith(told)
    activity = wrong.ranks[0].steps[0].activity
    same = with_step(wrong, 0, 1, activity=replace(activity, inputs={**activity.inputs, gives: (16.0, 8.0)}))
    assert first_wrong_input(same).endswith(told)
    alone = wrong_forward({"norm": (80.0, 8.0)}, layout="fsdp_2")
    assert first_wrong_input(without_sequence_parallel(alone)).endswith("but the input of norm does not")


@pytest.mark.parametrize(
    ("before", "why"),
    [((24.0, 24.0), "as if their dropout masks did"), ((24.0, 16.0), "which should have the same sum")],
)
def test_tp_ranks_that_differ_behind_dropout_alone_are_told_by_their_masks(before: tuple[float, ...], why: str) -> None:
    dropped, gives = "layers.0.attention_dropout", "layers.0.ffn_norm"
    trial = wrong_forward({gives: (16.0, 8.0)})
    for rank, squares in ((0, 24.0), (1, 16.0)):
        activity = trial.ranks[rank].steps[0].activity
        inputs = {**activity.inputs, dropped: (before[rank], 8.0), gives: (squares, 8.0)}
        trial = with_step(trial, rank, 1, activity=replace(activity, inputs=inputs))
    wanted = {**INPUTS, dropped: sum(before) / 16, gives: 4.0}
    trial = without_sequence_parallel(replace(trial, reference=replace(trial.reference, inputs=wanted)))
    trial = replace(trial, case=replace(trial.case, model=replace(trial.case.model, dropout=0.5)))
    assert first_wrong_input(trial).endswith(f"does not, and differs among tp ranks [0,1], {why}")


def without_sequence_parallel(trial: Trial) -> Trial:
    return replace(trial, case=replace(trial.case, features=replace(trial.case.features, sequence_parallel=False)))


def test_weights_that_are_updated_wrongly_do_not_go_into_the_first_forward_pass() -> None:
    trial = wrong_forward({"norm": (80.0, 8.0)})
    moved = {fqn: value + 1 for fqn, value in trial.ranks[0].steps[0].parameters.items()}
    trial = with_step(trial, 0, 1, parameters=moved)
    results = judge(trial)
    assert "update" in failing_checks(results)
    found = diagnose(trial, results)
    told = dict(evidence_rows(found.evidence)).get("still failing", diagnosis_line(found))
    assert told.startswith("the forward pass is wrong: the loss of step 1 is off by ")


def test_what_is_wrong_from_the_start_has_nothing_before_it() -> None:
    assert (
        cause(wrong_forward({"layers.0": (0.0, 8.0)}))
        == ": the input of layers.0 does not match the reference in mean square"
    )


def test_where_every_length_is_right_that_is_said() -> None:
    assert cause(wrong_forward({})) == (
        ": the input of every module matches the reference in mean square;"
        " the output or the loss may be computed otherwise, or something that keeps it"
    )


def test_a_module_that_nobody_saw_is_passed_over() -> None:
    trial = wrong_forward({"norm": (80.0, 8.0)})
    inputs = {"layers.0": 4.0, "layers.0.dropout": 2.0, "norm": 9.0}
    assert cause(replace(trial, reference=replace(trial.reference, inputs=inputs))) == (
        ": the input of layers.0 matches the reference in mean square, but the input of norm does not"
    )


def test_a_trainer_whose_modules_are_not_seen_is_told_nothing_of_them() -> None:
    trial = wrong_forward({})
    assert cause(replace(trial, reference=replace(trial.reference, inputs={}))) == ""


def test_the_probe_measures_what_the_reference_does_in_whatever_pieces() -> None:
    model_config = ModelConfig(name="tiny", dim=4, n_layers=1, n_heads=2, n_kv_heads=2, vocab_size=8, ffn_dim=8)
    model = llama_from(initial_weights(model_config, 1), config=model_config, dtype=torch.float64)
    tokens = torch.arange(24).reshape(4, 6) % 8
    clock = Clock()
    clock.enter_forward()
    recorder = ActivityRecorder(clock)
    recorder.attach([model])
    clock.phase = lambda: "forward"  # type: ignore[method-assign]
    for row in tokens:
        model(row[None])
    clock.phase = lambda: "backward"  # type: ignore[method-assign]
    model(tokens)  # recomputation is not measured
    recorder.remove()
    expected, seen = mean_squares(model, tokens), recorder.of_step(1).inputs
    assert list(expected) == list(seen)
    assert "tok_embeddings" not in seen and "layers.0.attention.inner_attention" in seen
    for fqn, (squares, count) in seen.items():
        assert np.isclose(squares / count, expected[fqn], rtol=1e-12, atol=0), fqn
