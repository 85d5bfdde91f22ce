"""The reference's own curves, reviewed in git, which guard the reference over time: named, read, compared and accepted.

A golden belongs to a recipe (model, training and what weights it starts from), whatever the layout of the cases that
use it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import BUILTIN, ROOT
from harness.core.case import case_files
from harness.core.case.case import Case
from harness.core.evidence.codec import encoded_without_values
from harness.core.evidence.own_folders import has_keys, is_json, replace_own
from harness.core.evidence.reading import read_json
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.record import Noise, ReferenceRun

BUILTIN_GOLDEN_FOLDER = BUILTIN / "golden"
SPREAD_NAMES = ("loss", "grad_norm", "gradient")
PARAMETER_SPREAD_NAMES = ("distance", "fit")


class GoldenError(Exception):
    """A golden is missing, damaged, or may not be rewritten here. The message says what to do."""


@dataclass(frozen=True)
class Golden:
    """The loss and gradient norm (before clipping) of every step, and the environment that computed them.

    noise: by TrainerTraits.noise_key, how far repeats of the reference lie from it; empty for exact recipes.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    environment: dict[str, str]
    noise: dict[str, Noise] = field(default_factory=dict)


def recipe_of(case: Case) -> dict[str, Any]:
    """Return the fields of model and training that differ from their defaults, as JSON values, and `model_of` if set.

    A new option with a default changes no recipe without it, so the goldens of these stay valid.
    """
    chosen: dict[str, Any] = {
        "model": _non_default_fields(case.model, ModelConfig()),
        "training": _non_default_fields(case.training, TrainingConfig()),
    }
    if case.model_of is not None:
        chosen["model_of"] = case.model_of
    return chosen


def launches_with_reference(case: Case) -> list[Case]:
    """Return one launch for each reference that judges the case, that of the last launch at the end.

    There are two if a launch starts from weights alone, because it has a reference of its own; otherwise it is the case
    itself.
    """
    return [case] if case.model_of is None else [case.first_launch, case]


def _non_default_fields(config: Any, default: Any) -> dict[str, Any]:
    """Return the fields of a config that differ from the default's, as they are stored."""
    defaults = encoded_without_values(default)
    return {key: value for key, value in encoded_without_values(config).items() if value != defaults[key]}


def recipe_name(case: Case) -> str:
    """Return the name of a recipe's golden: model, optimizer, dtype, and eight digits of the recipe's hash."""
    digest = hashlib.sha256(json.dumps(recipe_of(case), sort_keys=True).encode()).hexdigest()[:8]
    return f"{case.model.name}-{case.training.optimizer}-{case.training.dtype}-{digest}"


def golden_folder(case: Case) -> Path:
    """Return the folder of a case's goldens: golden/ beside cases/. This project's if the case comes from no file."""
    return case_files.repository_folder(case.file) / BUILTIN_GOLDEN_FOLDER.name if case.file else BUILTIN_GOLDEN_FOLDER


def golden_file(case: Case, folder: Path | None = None) -> Path:
    """Return the path of the golden of the case's recipe, whether it exists or not, by default in golden_folder."""
    return (folder or golden_folder(case)) / f"{recipe_name(case)}.json"


def golden_from_reference(reference: ReferenceRun) -> Golden:
    """Return the golden that a reference run would be accepted as; nothing is written."""
    losses = tuple(step.loss for step in reference.steps)
    norms = tuple(step.grad_norm for step in reference.steps)
    return Golden(losses, norms, dict(reference.environment), dict(reference.noise))


def load_golden(case: Case, folder: Path | None = None) -> Golden:
    """Read and return the golden of a case from `folder`.

    By default it is read from the case's golden folder, or if the file is not there from this project's. Raises
    GoldenError if there is none, if it is damaged, or if it was made for another recipe.
    """
    path = golden_file(case, folder)
    builtin_path = golden_file(case, BUILTIN_GOLDEN_FOLDER)
    if folder is None and not path.exists() and builtin_path.exists():
        path = builtin_path
    try:
        record = read_json(path)
        steps = record["steps"]
        golden = Golden(
            tuple(float(step["loss"]) for step in steps),
            tuple(float(step["grad_norm"]) for step in steps),
            record["environment"],
            {key: _noise_from_json(stored) for key, stored in record.get("noise", {}).items()},
        )
    except FileNotFoundError as error:
        remedy = f"make it with `{accept_case_command(case)}`, review it"
        raise GoldenError(f"{path}: no golden for this recipe; {remedy}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GoldenError(
            f"{path}: damaged golden ({error!r}); restore it from git or accept it anew: `{accept_case_command(case)}`"
        ) from error
    if record.get("recipe") != json.loads(json.dumps(recipe_of(case))):
        raise GoldenError(f"{path}: made for another recipe; accept it anew with `{accept_case_command(case)}`")
    return golden


def accept_command(case: Case, *more: str) -> str:
    """Return the shell command that accepts goldens of the case's file of cases. more: further arguments."""
    return shlex.join(["harness", "golden", "--accept", *case_files.cases_arguments(case.file), *more])


def accept_case_command(case: Case) -> str:
    """Return the shell command that accepts the golden of this case alone."""
    return accept_command(case, "-k", case.name)


def review_command(case: Case) -> str:
    """Return the shell command that shows how a case's goldens differ from those in git, new ones included."""
    folder = golden_folder(case)
    working_directory = Path.cwd()
    if folder.is_relative_to(working_directory):
        quoted = f"{shlex.quote(str(folder.relative_to(working_directory)))}/"
        return f"git add -N {quoted} && git diff {quoted}"
    quoted = shlex.quote(str(folder))
    return f"git -C {quoted} add -N . && git -C {quoted} diff ."


def _noise_from_json(stored: dict[str, Any]) -> Noise:
    """Return the noise that a golden's file has for one key."""
    loss, grad_norm, gradient = (_float_tuple(stored[name]) for name in SPREAD_NAMES)
    distance: dict[str, tuple[float, ...]] = {}
    fit: dict[str, tuple[float, ...]] = {}
    for fqn, spreads in stored.get("by_parameter", {}).items():
        distance[fqn] = _float_tuple(spreads["distance"])
        fit[fqn] = _float_tuple(spreads["fit"])
    return Noise(int(stored["repeats"]), loss, grad_norm, gradient, distance, fit)


def _float_tuple(stored: Iterable[float]) -> tuple[float, ...]:
    return tuple(map(float, stored))


def _noise_text(noise: Mapping[str, Noise]) -> str:
    """Return the text of a golden's noise: a line for each key and for each parameter. Empty without noise."""
    lines = ",\n".join(f'    "{key}": {_noise_json(spreads)}' for key, spreads in noise.items())
    return f',\n  "noise": {{\n{lines}\n  }}' if lines else ""


def _noise_json(noise: Noise) -> str:
    """Return the JSON of one key's noise: number of repeats, spreads, and a line for each parameter."""
    numbers = _spreads_json({name: getattr(noise, name) for name in SPREAD_NAMES})
    lines = []
    for fqn in noise.distance:
        spreads = _spreads_json({name: getattr(noise, name)[fqn] for name in PARAMETER_SPREAD_NAMES})
        lines.append(f'      "{fqn}": {{{spreads}}}')
    joined_lines = ",\n".join(lines)
    by_parameter = f', "by_parameter": {{\n{joined_lines}\n    }}' if lines else ""
    return f'{{"repeats": {noise.repeats}, {numbers}{by_parameter}}}'


def _spreads_json(by_name: Mapping[str, tuple[float, ...]]) -> str:
    """Return the JSON members of spreads, without braces: "name": [numbers].

    Each number has two digits, because a spread over a few repeats is known no better.
    """
    texts = []
    for name, spread in by_name.items():
        numbers = ", ".join(f"{number:.1e}" for number in spread)
        texts.append(f'"{name}": [{numbers}]')
    return ", ".join(texts)


def golden_text(case: Case, golden: Golden) -> str:
    """Return the text of a golden's file: one line a step, floats in full precision, so that a review sees what changed."""
    steps = [
        f'    {{"step": {number}, "loss": {loss!r}, "grad_norm": {norm!r}}}'
        for number, (loss, norm) in enumerate(zip(golden.losses, golden.grad_norms, strict=True), start=1)
    ]
    head = json.dumps({"recipe": recipe_of(case), "environment": golden.environment}, indent=2)
    return (
        head.removesuffix("\n}")
        + ',\n  "steps": [\n'
        + ",\n".join(steps)
        + "\n  ]"
        + _noise_text(golden.noise)
        + "\n}\n"
    )


def accept_golden(case: Case, reference: ReferenceRun, folder: Path | None = None) -> str:
    """Write the golden of a case into `folder`, by default its own, and return a text of what changed.

    Raises GoldenError in CI, and for a golden that comes with the installed harness. Raises it for a loss or norm of
    the reference that is not finite, and for a NaN in a repeat. Raises EvidenceError if a file that is no golden lies
    there. An old golden that cannot be loaded counts as none.
    """
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        raise GoldenError("goldens are not accepted in CI (the variable CI is set); accept on your machine and review")
    new = golden_from_reference(reference)
    path = golden_file(case, folder)
    if path.is_relative_to(ROOT / "harness"):
        raise GoldenError(f"{path}: comes with the installed harness; it is accepted in a checkout of it")
    if not all(map(math.isfinite, (*new.losses, *new.grad_norms))):
        raise GoldenError(f"{path}: the reference has a loss or norm that is no number, not accepted")
    if not all(noise.finite for noise in new.noise.values()):
        raise GoldenError(f"{path}: a repeat of the reference has a NaN, not accepted: there is no noise to judge by")
    old: Golden | None
    try:
        old = load_golden(case, folder)
    except GoldenError:
        old = None
    replace_own(path, golden_text(case, new), _is_golden)
    return describe_changes(path.name, old, new)


def _is_golden(text: str) -> bool:
    """Return whether the text of a file with a golden's name is one, or a damaged one.

    It may be cut short, or have the marks of a merge in it.
    """
    damaged = text.startswith("{") and not is_json(text)
    return damaged or has_keys(text, frozenset({"recipe", "environment", "steps"}))


def describe_changes(name: str, old: Golden | None, new: Golden) -> str:
    """Return a text of what accepting `new` in place of `old` changes: a line for each number that differs.

    name: the golden's file. old: None if there was none.
    """
    if old is None:
        return f"{name}: new, losses {', '.join(map(repr, new.losses))}"
    if (old.losses, old.grad_norms) == (new.losses, new.grad_norms):
        return f"{name}: unchanged" + (", its noise measured anew" if new.noise else "")
    lines = [f"{name}: largest relative difference {largest_difference(old, new):.2e}"]
    curves = (("loss", old.losses, new.losses), ("grad_norm", old.grad_norms, new.grad_norms))
    for quantity, old_curve, new_curve in curves:
        for step, (before, after) in enumerate(zip(old_curve, new_curve, strict=False), start=1):
            if before != after:
                lines.append(f"  step {step}  {quantity} {before!r} -> {after!r}")
    if len(old.losses) != len(new.losses):
        lines.append(f"  {len(old.losses)} -> {len(new.losses)} steps")
    return "\n".join(lines)


def largest_difference(old: Golden, new: Golden) -> float:
    """Return the largest relative difference of losses and gradient norms of all steps; inf if the number of steps differs."""
    if len(old.losses) != len(new.losses):
        return math.inf
    pairs = zip((*old.losses, *old.grad_norms), (*new.losses, *new.grad_norms), strict=True)
    return max((_relative_change(before, after) for before, after in pairs), default=0.0)


def _relative_change(before: float, after: float) -> float:
    """Return |after - before| / |before|; 0 if they are equal. inf if only `before` is 0, or if it is not finite."""
    if before == after:
        return 0.0
    difference = abs(after - before) / abs(before) if before else math.inf
    return difference if math.isfinite(difference) else math.inf
