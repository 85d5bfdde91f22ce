"""For recipes with noise: where correct runs lie, where the bound lies, and where the smallest deliberate mistakes lie.

One picture for each recipe and way of summing, and one table of all. Mistakes are made in the reference, on one device,
so that nothing else differs. They are gradients 1% too large, one of four microbatches lost, and rotary angles in a lower
precision.
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
from harness.core.evidence.store import load
from harness.core.judge import golden
from harness.core.judge.assembly import gradient_distance, misfits
from harness.core.judge.losses import global_loss
from harness.core.judge.stored_trial import load_trial
from harness.core.judge.tolerance import FACTOR, Bounds
from harness.core.judge.trial import Trial
from harness.core.run.options import Options
from harness.core.run.reference_cache import reference_folder
from harness.core.run.run_case import run_case
from harness.reference import train
from harness.reference.distance import largest_of
from harness.reference.model import Attention
from harness.reference.noise import measure
from harness.reference.record import Noise, ReferenceRun

NUMBERS = ("loss", "grad_norm", "gradient", "parameter")
Distances = dict[str, list[float]]
"""Number -> the relative distance from the reference in each step; of the parameter that is farthest off as a whole, how many
times its bound that is."""


@dataclass(frozen=True)
class Margin:
    """What there is to show of one recipe and way of summing."""

    name: str
    recipe: str
    bound: Distances
    correct: dict[str, Distances]
    mistakes: dict[str, Distances]

    def ratios(self, distances: Distances) -> dict[str, float]:
        """Return each number over its bound, in the step where that is most: below 1 is within."""
        return {n: largest_of([d / b for d, b in zip(distances[n], self.bound[n], strict=True)]) for n in NUMBERS}


def margin(cases: Sequence[Case], options: Options) -> Margin:
    """Runs these cases, which share a recipe and a noise key, and makes the mistakes. Raises NoBound."""
    folders = {case.name: run_case(case, options).folder for case in cases}
    trials = {name: load_trial(folder) for name, folder in folders.items()}
    name, trial = next(iter(trials.items()))
    bounds, case = trial.bounds, trial.case
    key = trial.traits.noise_key(case)
    reference = load(reference_folder(case, options) / "reference.npz", ReferenceRun)  # in the model's own order
    return Margin(
        name=f"{golden.recipe_name(case)} {key}",
        recipe=_said(case, key),
        bound={name: list(getattr(bounds, name).values()) for name in NUMBERS[:3]}
        | {"parameter": [1.0] * len(reference.steps)},
        correct={name: _distances(one) for name, one in trials.items()},
        mistakes={name: _of_mistake(trial, reference, make) for name, make in MISTAKES.items()},
    )


def _said(case: Case, key: str) -> str:
    """The recipe as what differs from the defaults, and how the reference was cut to measure its noise."""
    kind = case.training.quantize or case.training.compute_dtype or case.training.dtype
    kind += " compiled" if case.features.compile else ""
    others = {**golden.recipe(case)["model"], **golden.recipe(case)["training"]}
    shown = [f"{key} {value}" for key, value in others.items() if key not in ("quantize", "compute_dtype", "dtype")]
    return ", ".join([kind, key, *shown])


def _distances(trial: Trial) -> Distances:
    found: Distances = {name: [0.0] * len(trial.reference.steps) for name in NUMBERS}
    for rank, step, reference in trial.steps():
        loss = global_loss(trial, step.step)
        seen = {
            "loss": abs((loss if loss is not None else float("nan")) / reference.loss - 1),
            "grad_norm": abs((step.grad_norm or 0.0) / reference.grad_norm - 1),
            "gradient": largest_of(
                [gradient_distance(trial, rank, f, g, reference.gradients[f]) for f, g in step.gradients.items()]
            ),
        }
        for name, value in seen.items():
            found[name][step.step - 1] = largest_of([found[name][step.step - 1], value])
    found["parameter"] = [largest_of([m.excess for m in misfits(trial, step)[0]]) for step in trial.case.steps]
    return found


# ---- mistakes


def _of_mistake(trial: Trial, reference: ReferenceRun, make: Callable[[Case], Any]) -> Distances:
    case = trial.case
    with make(case):
        wrong = train.train(case.model, case.training, model_of=case.model_of).steps
    by_step = {one.step: measure((right,), [(one,)]) for right, one in zip(reference.steps, wrong, strict=True)}
    found = {name: [getattr(one, name)[0] for one in by_step.values()] for name in NUMBERS[:3]}
    return found | {"parameter": [_excess(trial.bounds, step, one) for step, one in by_step.items()]}


def _excess(bounds: Bounds, step: int, seen: Noise) -> float:
    """How many times its bound the parameter is off that is farthest off."""
    parts = bounds.by_parameter.items()
    distances = [seen.distance[fqn][0] / bound.distance[step] for fqn, bound in parts]
    return largest_of(distances + [seen.fit[fqn][0] / bound.fit[step] for fqn, bound in parts])


@contextmanager
def _exchanged(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _scaled(case: Case) -> Any:
    original = train.forward_loss

    def loss_of(*args: Any, **options: Any) -> torch.Tensor:
        loss = original(*args, **options)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * 1.01)
        return loss

    return _exchanged(train, "forward_loss", loss_of)


def _microbatch_lost(case: Case) -> Any:
    original, most = train.forward_loss, case.training.global_batch

    def loss_of(model: Any, tokens: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
        kept = len(tokens) - most // 4 if len(tokens) == most else len(tokens)
        return original(model, tokens[:kept], labels[:kept], **options)

    return _exchanged(train, "forward_loss", loss_of)


def _coarse_angles(case: Case) -> Any:
    """float32 instead of float64, else bfloat16."""
    original = Attention.angles
    dtype = torch.float32 if case.training.dtype == "float64" else torch.bfloat16

    def angles(self: Attention, positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return original(self, positions, like.to(dtype)).to(like.dtype)

    return _exchanged(Attention, "angles", angles)


MISTAKES: dict[str, Callable[[Case], Any]] = {
    "gradients 1% too large": _scaled,
    "one of four microbatches lost": _microbatch_lost,
    "rotary angles in lower precision": _coarse_angles,
}


# ---- showing


def table(one: Margin) -> str:
    """How far each lies from the reference over its bound."""
    ends = {name: f"{bound[0]:.0e}/{bound[-1]:.0e}" for name, bound in one.bound.items()}
    lines = [f"{one.name}: {one.recipe}", f"  {'bound in step 1 / in the last':<34}{_cells(ends)}"]
    for kind in (one.correct, one.mistakes):
        for name, distances in kind.items():
            ratios = one.ratios(distances)
            seen = [n for n in NUMBERS if not ratios[n] <= 1]
            verdict = f"seen by {', '.join(seen)}" if seen else "within" if kind is one.correct else "NOT SEEN"
            lines.append(f"  {name:<34}{_cells({n: f'{r:.2g}' for n, r in ratios.items()})}  {verdict}")
    return "\n".join(lines)


def _cells(values: dict[str, str]) -> str:
    return "".join(f"  {name} {value:<12}" for name, value in values.items())


def draw(one: Margin, folder: Path) -> Path:
    figure, panels = plt.subplots(1, 4, figsize=(19, 5))
    for axes, number in zip(panels, NUMBERS, strict=True):
        steps = range(1, len(one.bound[number]) + 1)
        axes.semilogy(steps, one.bound[number], "r-", linewidth=2, label="bound")
        if number != "parameter":
            axes.semilogy(steps, [b / FACTOR for b in one.bound[number]], "-", color="0.6", label="spread of repeats")
        for name, distances in one.correct.items():
            axes.semilogy(steps, [max(d, 1e-17) for d in distances[number]], "o", label=name)
        for marker, (name, distances) in zip("xv^", one.mistakes.items(), strict=True):
            axes.semilogy(steps, [max(d, 1e-17) for d in distances[number]], f"k{marker}:", label=name)
        axes.set(title=number, xlabel="step", xticks=list(steps))
    panels[0].legend(fontsize=7)
    figure.suptitle(f"{one.recipe}: relative distance from the reference", wrap=True)
    path = folder / f"margins-{one.name.replace(' ', '-')}.png"
    refuse_foreign_file(path, is_drawing)
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


def draw_all(every: Sequence[Margin], folder: Path) -> Path:
    """One row a recipe: how far correct runs and mistakes lie, over the bound, by the number that shows them most."""
    figure, axes = plt.subplots(figsize=(11, 1.2 + 0.32 * len(every)))
    for row, one in enumerate(every):
        correct = [max(one.ratios(distances).values()) for distances in one.correct.values()]
        axes.semilogx(correct, [row] * len(correct), "o", color="tab:green", label="correct runs" if row == 0 else None)
        for marker, (name, distances) in zip("xv^", one.mistakes.items(), strict=True):
            axes.semilogx(max(one.ratios(distances).values()), row, f"k{marker}", label=name if row == 0 else None)
    axes.axvline(1.0, color="r", linewidth=2, label="bound")
    axes.set(yticks=range(len(every)), yticklabels=[one.recipe for one in every], xlabel="distance / bound")
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="upper center", ncols=5, fontsize=7)
    path = folder / "margins.png"
    refuse_foreign_file(path, is_drawing)
    figure.savefig(path, dpi=90, bbox_inches="tight")
    plt.close(figure)
    return path


def recipes(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases with noise, by recipe and noise key. Cases that must fail show no correct run, and are left out."""
    found: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        if not case.exact and case.expected_failure is None:
            found.setdefault((golden.recipe_name(case), case.noise_key), []).append(replace(case, runs=1))
    return list(found.values())
