"""Margins of recipes with noise: where correct runs lie, where the bound lies, and where the smallest deliberate mistakes lie.

There is one picture for each recipe and way of summing, and one table of all. Mistakes are made in the reference, on
one device, so that nothing else differs. They are gradients 1% too large, one of four microbatches lost, and rotary
angles in a lower precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch

from harness.core.case.case import Case
from harness.core.evidence.own_folders import is_drawing, refuse_foreign_file
from harness.core.evidence.store import load_stored
from harness.core.judge import golden
from harness.core.judge.assembly import gradient_distance, gradient_misfits
from harness.core.judge.losses import global_loss
from harness.core.judge.stored_trial import load_trial
from harness.core.judge.tolerance import FACTOR, Bounds
from harness.core.judge.trial import Trial
from harness.core.run.options import Options
from harness.core.run.reference_cache import reference_folder
from harness.core.run.run_case import run_case
from harness.reference import train
from harness.reference.distance import largest_or_nan
from harness.reference.model import Attention
from harness.reference.noise import measure_noise
from harness.reference.record import Noise, ReferenceRun

NUMBERS = ("loss", "grad_norm", "gradient", "parameter")
Distances = dict[str, list[float]]
"""Number -> relative distance from the reference in each step. For "parameter" it is the distance of the parameter that is
farthest off as a whole, divided by its bound."""


@dataclass(frozen=True)
class Margin:
    """The distances of runs from the reference, and their bounds, for one recipe and way of summing."""

    name: str
    recipe: str
    """The recipe in words."""
    bound: Distances
    correct: dict[str, Distances]
    """Case -> distances of its correct run."""
    mistakes: dict[str, Distances]
    """Mistake -> distances of the reference that was trained with it."""

    def ratios(self, distances: Distances) -> dict[str, float]:
        """Return for each number the largest ratio of distance to bound over all steps; NaN if one is.

        Up to 1 is within the bound.
        """
        ratios = {}
        for name in NUMBERS:
            pairs = zip(distances[name], self.bound[name], strict=True)
            ratios[name] = largest_or_nan([distance / bound for distance, bound in pairs])
        return ratios


def make_margin(cases: Sequence[Case], options: Options) -> Margin:
    """Run the cases, train the reference with each mistake, and return all distances. The cases share a recipe and a noise key.

    Raises NoBound, and what run_case raises.
    """
    folders = {case.name: run_case(case, options).folder for case in cases}
    trials = {name: load_trial(folder) for name, folder in folders.items()}
    name, trial = next(iter(trials.items()))
    bounds = trial.bounds
    case = trial.case
    key = trial.traits.noise_key(case)
    reference = load_stored(reference_folder(case, options) / "reference.npz", ReferenceRun)  # in the model's own order
    bound = {name: list(getattr(bounds, name).values()) for name in NUMBERS[:3]}
    bound["parameter"] = [1.0] * len(reference.steps)
    return Margin(
        name=f"{golden.recipe_name(case)} {key}",
        recipe=_recipe_text(case, key),
        bound=bound,
        correct={name: _run_distances(trial) for name, trial in trials.items()},
        mistakes={name: _mistake_distances(trial, reference, make) for name, make in MISTAKES.items()},
    )


def _recipe_text(case: Case, key: str) -> str:
    """Return the recipe in words: dtype, the noise key (how the reference was cut), and fields that differ from the
    defaults.
    """
    dtype_text = case.training.quantize or case.training.compute_dtype or case.training.dtype
    dtype_text += " compiled" if case.features.compile else ""
    others = {**golden.recipe_of(case)["model"], **golden.recipe_of(case)["training"]}
    shown_fields = [
        f"{key} {value}" for key, value in others.items() if key not in ("quantize", "compute_dtype", "dtype")
    ]
    return ", ".join([dtype_text, key, *shown_fields])


def _run_distances(trial: Trial) -> Distances:
    """Return how far a run lies from the reference, in each step the rank that is farthest off. A missing loss is NaN."""
    distances: Distances = {name: [0.0] * len(trial.reference.steps) for name in NUMBERS}
    for rank, step, reference in trial.steps_with_reference():
        loss = global_loss(trial, step.step)
        distances_of_step = {
            "loss": abs((loss if loss is not None else float("nan")) / reference.loss - 1),
            "grad_norm": abs((step.grad_norm or 0.0) / reference.grad_norm - 1),
            "gradient": largest_or_nan(
                [
                    gradient_distance(trial, rank, fqn, gradient, reference.gradients[fqn])
                    for fqn, gradient in step.gradients.items()
                ]
            ),
        }
        for name, value in distances_of_step.items():
            distances[name][step.step - 1] = largest_or_nan([distances[name][step.step - 1], value])
    distances["parameter"] = []
    for number in trial.case.steps:
        excesses = [misfit.ratio_to_bound for misfit in gradient_misfits(trial, number)[0]]
        distances["parameter"].append(largest_or_nan(excesses))
    return distances


# ---- mistakes


def _mistake_distances(trial: Trial, reference: ReferenceRun, make: Callable[[Case], Any]) -> Distances:
    """Return how far the reference lies from itself if it is trained with a mistake.

    make: case -> context in which the mistake is made.
    """
    case = trial.case
    with make(case):
        wrong_steps = train.train(case.model, case.training, model_of=case.model_of).steps
    by_step = {
        step.step: measure_noise((right,), [(step,)]) for right, step in zip(reference.steps, wrong_steps, strict=True)
    }
    distances = {}
    for name in NUMBERS[:3]:
        distances[name] = [getattr(noise, name)[0] for noise in by_step.values()]
    distances["parameter"] = [_largest_ratio(trial.bounds, step, noise) for step, noise in by_step.items()]
    return distances


def _largest_ratio(bounds: Bounds, step: int, seen: Noise) -> float:
    """Return the largest ratio of distance, or of fit, to its bound, over all parameters in a step. seen: distances
    from the reference.
    """
    bounds_of_parameters = bounds.by_parameter.items()
    distances = [seen.distance[fqn][0] / bound.distance[step] for fqn, bound in bounds_of_parameters]
    return largest_or_nan(distances + [seen.fit[fqn][0] / bound.fit[step] for fqn, bound in bounds_of_parameters])


@contextmanager
def _exchange_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set owner.name to a value while the block runs, and back at its end."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _scale_gradients(case: Case) -> Any:
    """Return a context manager in which the reference's gradients are 1% too large."""
    original = train.forward_loss

    def loss_of(*args: Any, **options: Any) -> torch.Tensor:
        loss = original(*args, **options)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * 1.01)
        return loss

    return _exchange_attribute(train, "forward_loss", loss_of)


def _lose_microbatch(case: Case) -> Any:
    """Return a context manager in which the reference loses the last quarter of each whole batch."""
    original = train.forward_loss
    global_batch = case.training.global_batch

    def loss_of(model: Any, tokens: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        kept_samples = len(tokens) - global_batch // 4 if len(tokens) == global_batch else len(tokens)
        return original(model, tokens[:kept_samples], labels[:kept_samples], **options)

    return _exchange_attribute(train, "forward_loss", loss_of)


def _round_angles(case: Case) -> Any:
    """Return a context manager in which rotary angles are in float32 for a float64 recipe, else in bfloat16."""
    original = Attention.angles
    dtype = torch.float32 if case.training.dtype == "float64" else torch.bfloat16

    def angles(self: Attention, positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return original(self, positions, like.to(dtype)).to(like.dtype)

    return _exchange_attribute(Attention, "angles", angles)


MISTAKES: dict[str, Callable[[Case], Any]] = {
    "gradients 1% too large": _scale_gradients,
    "one of four microbatches lost": _lose_microbatch,
    "rotary angles in lower precision": _round_angles,
}


# ---- showing


def margin_table(margin: Margin) -> str:
    """Return the text of a table: distances divided by bounds, of correct runs, then of mistakes, each with a verdict.

    "within" is a correct run, "NOT SEEN" a mistake, without a number beyond its bound. Else the verdict names these
    numbers.
    """
    ends_of_bounds = {name: f"{bound[0]:.0e}/{bound[-1]:.0e}" for name, bound in margin.bound.items()}
    lines = [f"{margin.name}: {margin.recipe}", f"  {'bound in step 1 / in the last':<34}{_cells(ends_of_bounds)}"]
    for kind in (margin.correct, margin.mistakes):
        for name, distances in kind.items():
            ratios = margin.ratios(distances)
            failing_numbers = [number for number in NUMBERS if not ratios[number] <= 1]
            verdict = "within" if kind is margin.correct else "NOT SEEN"
            if failing_numbers:
                verdict = f"seen by {', '.join(failing_numbers)}"
            ratio_texts = {number: f"{ratio:.2g}" for number, ratio in ratios.items()}
            lines.append(f"  {name:<34}{_cells(ratio_texts)}  {verdict}")
    return "\n".join(lines)


def _cells(values: dict[str, str]) -> str:
    """Return the cells of a row: each name with its value."""
    return "".join(f"  {name} {value:<12}" for name, value in values.items())


def draw_margin(margin: Margin, folder: Path) -> Path:
    """Draw distances and bounds of each number by step, into margins-NAME.png in the folder. Return the file.

    Raises EvidenceError if something else than a drawing lies there, and ValueError unless there are three mistakes.
    """
    figure, panels = plt.subplots(1, 4, figsize=(19, 5))
    for axes, number in zip(panels, NUMBERS, strict=True):
        steps = range(1, len(margin.bound[number]) + 1)
        axes.semilogy(steps, margin.bound[number], "r-", linewidth=2, label="bound")
        if number != "parameter":
            axes.semilogy(
                steps, [b / FACTOR for b in margin.bound[number]], "-", color="0.6", label="spread of repeats"
            )
        for name, distances in margin.correct.items():
            axes.semilogy(steps, [max(d, 1e-17) for d in distances[number]], "o", label=name)
        for marker, (name, distances) in zip("xv^", margin.mistakes.items(), strict=True):
            axes.semilogy(steps, [max(d, 1e-17) for d in distances[number]], f"k{marker}:", label=name)
        axes.set(title=number, xlabel="step", xticks=list(steps))
    panels[0].legend(fontsize=7)
    figure.suptitle(f"{margin.recipe}: relative distance from the reference", wrap=True)
    path = folder / f"margins-{margin.name.replace(' ', '-')}.png"
    refuse_foreign_file(path, is_drawing)
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


def draw_all(all_margins: Sequence[Margin], folder: Path) -> Path:
    """Draw one row for each recipe into margins.png: distances of correct runs and mistakes, divided by the bound.

    Return the file. Each distance is that of the number that shows it most. Raises ValueError unless each recipe has
    three mistakes, and EvidenceError if something else than a drawing lies there.
    """
    figure, axes = plt.subplots(figsize=(11, 1.2 + 0.32 * len(all_margins)))
    for row, margin in enumerate(all_margins):
        correct = [max(margin.ratios(distances).values()) for distances in margin.correct.values()]
        axes.semilogx(correct, [row] * len(correct), "o", color="tab:green", label="correct runs" if row == 0 else None)
        for marker, (name, distances) in zip("xv^", margin.mistakes.items(), strict=True):
            axes.semilogx(max(margin.ratios(distances).values()), row, f"k{marker}", label=name if row == 0 else None)
    axes.axvline(1.0, color="r", linewidth=2, label="bound")
    axes.set(
        yticks=range(len(all_margins)), yticklabels=[margin.recipe for margin in all_margins], xlabel="distance / bound"
    )
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="upper center", ncols=5, fontsize=7)
    path = folder / "margins.png"
    refuse_foreign_file(path, is_drawing)
    figure.savefig(path, dpi=90, bbox_inches="tight")
    plt.close(figure)
    return path


def group_by_recipe(cases: Sequence[Case]) -> list[list[Case]]:
    """Return the cases with noise, grouped by recipe and noise key, each with one launch only.

    Exact cases, and those that are expected to fail, are left out.
    """
    cases_by_recipe: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        if not case.has_derived_bounds and case.expected_failure is None:
            cases_by_recipe.setdefault((golden.recipe_name(case), case.noise_key), []).append(replace(case, runs=1))
    return list(cases_by_recipe.values())
