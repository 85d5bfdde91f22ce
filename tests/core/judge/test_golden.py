"""Goldens: accepted on a person's machine, read back digit for digit, never taken for what they are not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from literal import SGD, tiny_case
from literal_reference import reference_of

from harness import ROOT
from harness.core.case.dims import ParallelDims
from harness.core.case.loading import find_case, load_all
from harness.core.judge import golden
from harness.core.judge.golden import (
    Golden,
    GoldenError,
    accept_command,
    accept_golden,
    describe_changes,
    golden_file,
    golden_text,
    largest_difference,
    load_golden,
    recipe_name,
    review_command,
)
from harness.reference.record import Noise

CASE = tiny_case("fsdp_2")
REFERENCE = reference_of(CASE)


@pytest.fixture(autouse=True)
def _on_a_persons_machine(monkeypatch) -> None:
    monkeypatch.delenv("CI", raising=False)


def moved(step: int, **changes):
    """The reference with something else in one step."""
    steps = [replace(s, **changes) if s.step == step else s for s in REFERENCE.steps]
    return replace(REFERENCE, steps=tuple(steps))


# ---- accepting


def test_what_is_accepted_is_read_back_digit_for_digit(tmp_path: Path) -> None:
    losses = [step.loss for step in REFERENCE.steps]
    name = f"{recipe_name(CASE)}.json"
    assert accept_golden(CASE, REFERENCE, tmp_path) == f"{name}: new, losses {', '.join(map(repr, losses))}"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert load_golden(CASE, tmp_path) == golden.golden_from_reference(REFERENCE)


def test_accepting_the_same_again_says_unchanged_and_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    accept_golden(CASE, REFERENCE, tmp_path)
    text = golden_file(CASE, tmp_path).read_text()
    assert accept_golden(CASE, REFERENCE, tmp_path) == f"{recipe_name(CASE)}.json: unchanged"
    assert golden_file(CASE, tmp_path).read_text() == text


def test_accepting_another_loss_shows_old_new_and_difference(tmp_path: Path) -> None:
    accept_golden(CASE, REFERENCE, tmp_path)
    old = REFERENCE.steps[1].loss
    new = old * 1.5
    assert accept_golden(CASE, moved(2, loss=new), tmp_path) == (
        f"{recipe_name(CASE)}.json: largest relative difference 5.00e-01\n  step 2  loss {old!r} -> {new!r}"
    )
    assert load_golden(CASE, tmp_path).losses[1] == new


def test_accepting_another_norm_shows_it_too(tmp_path: Path) -> None:
    accept_golden(CASE, REFERENCE, tmp_path)
    old = REFERENCE.steps[2].grad_norm
    assert accept_golden(CASE, moved(3, grad_norm=old * 2), tmp_path) == (
        f"{recipe_name(CASE)}.json: largest relative difference 1.00e+00\n  step 3  grad_norm {old!r} -> {old * 2!r}"
    )


def test_a_change_of_the_last_digit_is_not_unchanged() -> None:
    old, new = Golden((0.1,), (1.0,), {}), Golden((0.10000000000000002,), (1.0,), {})
    assert describe_changes("x", old, new) == (
        "x: largest relative difference 1.39e-16\n  step 1  loss 0.1 -> 0.10000000000000002"
    )


def test_another_number_of_steps_is_infinitely_far() -> None:
    old, new = Golden((1.0, 2.0), (1.0, 2.0), {}), Golden((1.0,), (1.0,), {})
    assert describe_changes("x", old, new) == "x: largest relative difference inf\n  2 -> 1 steps"


@pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (0.0, math.nan), (1.0, math.nan), (1.0, math.inf)])
def test_the_difference_from_zero_or_to_no_number_is_infinite(before: float, after: float) -> None:
    assert largest_difference(Golden((before, 1.0), (1.0, 1.0), {}), Golden((after, 1.0), (1.0, 1.0), {})) == math.inf


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reference_that_is_no_number_is_not_accepted(tmp_path: Path, value: float) -> None:
    with pytest.raises(GoldenError, match="the reference has a loss or norm that is no number, not accepted"):
        accept_golden(CASE, moved(3, loss=value), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["loss", "grad_norm", "gradient"])
def test_noise_that_is_no_number_is_not_accepted(tmp_path: Path, what: str) -> None:
    noise = replace(Noise(16, (1e-9,) * 3, (1e-8,) * 3, (1e-7,) * 3), **{what: (1e-9, math.nan, 1e-9)})
    with pytest.raises(GoldenError, match="a repeat of the reference has a NaN, not accepted"):
        accept_golden(CASE, replace(REFERENCE, noise={"float32 parts": noise}), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_measured_noise_is_read_back_in_two_digits_and_told_when_nothing_else_changed(tmp_path: Path) -> None:
    noise = {
        "float32 shares": Noise(16, (1.26e-9, 2e-9, 3e-9), (0.0, 1e-8, 1e-8), (4e-7, 5e-7, 6e-7)),
        "float32 parts": Noise(16, (1e-9,) * 3, (1e-8,) * 3, (1e-7,) * 3),
    }
    accept_golden(CASE, replace(REFERENCE, noise=noise), tmp_path)
    read = load_golden(CASE, tmp_path)
    assert list(read.noise) == list(noise)
    assert read.noise["float32 parts"] == noise["float32 parts"]
    first = read.noise["float32 shares"]
    assert (first.repeats, first.loss, first.gradient) == (16, (1.3e-9, 2e-9, 3e-9), (4e-7, 5e-7, 6e-7))
    assert first.distance == {}
    told = accept_golden(CASE, replace(REFERENCE, noise=noise), tmp_path)
    assert told == f"{recipe_name(CASE)}.json: unchanged, its noise measured anew"
    assert read.environment == REFERENCE.environment


def test_the_noise_of_each_parameter_has_a_line_of_its_own_and_is_read_back(tmp_path: Path) -> None:
    one = Noise(16, (1e-9,), (1e-8,), (1e-7,), {"a": (1.26e-3,), "b": (0.0,)}, {"a": (2e-4,), "b": (3e-4,)})
    accept_golden(CASE, replace(REFERENCE, noise={"float32 parts": one, "float32 shares": one}), tmp_path)
    assert load_golden(CASE, tmp_path).noise["float32 shares"] == replace(one, distance={"a": (1.3e-3,), "b": (0.0,)})
    told = golden_file(CASE, tmp_path).read_text()
    assert told.count('\n      "a": {"distance": [1.3e-03], "fit": [2.0e-04]},\n') == 2
    assert told.count('\n      "b": {"distance": [0.0e+00], "fit": [3.0e-04]}\n') == 2


def test_a_golden_with_fewer_norms_than_losses_is_not_written() -> None:
    with pytest.raises(ValueError):
        golden_text(CASE, Golden((1.0, 2.0), (1.0,), {}))


def test_curves_of_no_step_do_not_differ_and_curves_of_different_lengths_are_never_compared() -> None:
    assert largest_difference(Golden((), (), {}), Golden((), (), {})) == 0.0
    with pytest.raises(ValueError):
        largest_difference(Golden((1.0,), (1.0,), {}), Golden((1.0,), (1.0, 2.0), {}))


def test_a_recipes_name_is_stable() -> None:
    assert recipe_name(CASE) == "tiny-adamw-float64-9daeef29"


# ---- in CI


@pytest.mark.parametrize("ci", ["true", "1", "True", "yes"])
def test_nothing_is_accepted_in_ci(tmp_path: Path, monkeypatch, ci: str) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(GoldenError) as error:
        accept_golden(CASE, REFERENCE, tmp_path)
    assert str(error.value) == (
        "goldens are not accepted in CI (the variable CI is set); accept on your machine and review"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ci", ["", "0", "false", "False"])
def test_an_empty_or_false_ci_variable_is_not_ci(tmp_path: Path, monkeypatch, ci: str) -> None:
    monkeypatch.setenv("CI", ci)
    accept_golden(CASE, REFERENCE, tmp_path)
    assert len(load_golden(CASE, tmp_path).losses) == 3


# ---- reading


def refusal(tmp_path: Path) -> str:
    with pytest.raises(GoldenError) as error:
        load_golden(CASE, tmp_path)
    return str(error.value).removeprefix(f"{golden_file(CASE, tmp_path)}: ")


def test_a_missing_golden_is_answered_with_the_command(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "no golden for this recipe; make it with `harness golden --accept -k tiny`, review it"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"steps": 3}', '{"steps": [{"loss": 1.0}]}', '{"steps": []}'])
def test_a_damaged_golden_is_answered_with_the_remedy(tmp_path: Path, damage: str) -> None:
    golden_file(CASE, tmp_path).write_text(damage)
    message = refusal(tmp_path)
    assert message.startswith("damaged golden (") and message.endswith(
        "); restore it from git or accept it anew: `harness golden --accept -k tiny`"
    )


def test_the_golden_of_another_recipe_is_not_believed(tmp_path: Path) -> None:
    other = tiny_case("fsdp_2", SGD)
    golden_file(CASE, tmp_path).write_text(golden_text(other, golden.golden_from_reference(REFERENCE)))
    assert refusal(tmp_path) == "made for another recipe; accept it anew with `harness golden --accept -k tiny`"


def test_a_damaged_golden_is_replaced_by_accepting(tmp_path: Path) -> None:
    golden_file(CASE, tmp_path).write_text("{")
    assert ": new, losses" in accept_golden(CASE, REFERENCE, tmp_path)
    assert len(load_golden(CASE, tmp_path).losses) == 3


# ---- whose golden


def test_one_recipe_has_one_golden_whatever_the_layout() -> None:
    assert recipe_name(CASE) == recipe_name(tiny_case("hsdp_2x2", accumulation=2, name="other"))
    assert recipe_name(CASE) != recipe_name(tiny_case("fsdp_2", SGD))
    assert recipe_name(CASE) != recipe_name(replace(CASE, training=replace(CASE.training, lr=0.02)))


def test_the_golden_of_somebody_elses_case_lies_beside_the_case(tmp_path: Path) -> None:
    theirs = replace(CASE, file=str(tmp_path / "cases" / "mine.yaml"))
    with pytest.raises(
        GoldenError, match=f"{tmp_path}/golden/.*`harness golden --accept --cases {tmp_path}/cases -k tiny`"
    ):
        load_golden(theirs)
    accept_golden(theirs, REFERENCE)
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "golden"]
    assert load_golden(theirs) == golden.golden_from_reference(REFERENCE)


def test_a_golden_that_came_with_an_installed_harness_is_not_rewritten_there(tmp_path: Path) -> None:
    with pytest.raises(GoldenError, match="comes with the installed harness; it is accepted in a checkout of it"):
        accept_golden(CASE, REFERENCE, ROOT / "harness" / "golden")


def test_a_recipe_of_this_project_has_its_golden_wherever_the_case_lies(tmp_path: Path) -> None:
    ours = find_case("fsdp_2", load_all())
    assert golden.golden_folder(ours) == golden.BUILTIN_GOLDEN_FOLDER
    assert load_golden(replace(ours, file=str(tmp_path / "mine.yaml"))) == load_golden(ours)


def test_the_file_has_one_line_a_step_so_that_a_review_sees_what_moved() -> None:
    text = golden_text(CASE, Golden((1.5, 0.1), (2.0, 1e-9), {"torch": "2"}))
    assert text.endswith(
        '  "environment": {\n    "torch": "2"\n  },\n  "steps": [\n'
        '    {"step": 1, "loss": 1.5, "grad_norm": 2.0},\n'
        '    {"step": 2, "loss": 0.1, "grad_norm": 1e-09}\n  ]\n}\n'
    )
    assert json.loads(text)["recipe"] == json.loads(json.dumps(golden.recipe_of(CASE)))


def test_what_is_to_be_typed_names_the_folder_of_the_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my cases"
    case = replace(tiny_case(ParallelDims()), file=str(folder / "some.yaml"))
    assert accept_command(case, "-k", "x") == f"harness golden --accept --cases '{folder}' -k x"
    assert review_command(case) == f"git -C '{folder}/golden' add -N . && git -C '{folder}/golden' diff ."
    monkeypatch.chdir(tmp_path)
    assert review_command(case) == "git add -N 'my cases/golden'/ && git diff 'my cases/golden'/"
    assert accept_command(replace(case, file="cases/some.yaml")) == "harness golden --accept --cases builtin"
    assert accept_command(replace(case, file=str(tmp_path / "cases" / "some.yaml"))) == "harness golden --accept"
    monkeypatch.chdir(ROOT)
    assert accept_command(replace(case, file="cases/some.yaml")) == "harness golden --accept"
