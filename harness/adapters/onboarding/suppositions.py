"""Suppositions: usual mistakes of an adapter about its trainer's model, each tested by training the reference as if it were so.

The loss of step 1 chooses among suppositions, and pairs of them. The checks then judge all that there is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.adapters.onboarding.skeleton import as_yaml
from harness.core.causes.assume import assume_case, assume_reference
from harness.core.checks import judge
from harness.core.judge.held_values import reference_order_arguments
from harness.core.judge.losses import global_loss
from harness.core.judge.result import Result
from harness.core.judge.tolerance import NoBound
from harness.core.judge.trial import Trial
from harness.reference.config import ModelConfig, TrainingConfig

if TYPE_CHECKING:
    from harness.reference.spellings import Alteration

EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, float(np.finfo(np.float64).eps), float(np.finfo(np.float32).eps))
THETAS = (10_000.0, 500_000.0, 1_000_000.0)
SWAPPED = (("w1", "w3"), ("wq", "wo"), ("wk", "wv"), ("attention_norm", "ffn_norm"), ("tok_embeddings", "output"))
SQUARE = ("wq", "wo")
MOST_SUPPOSITIONS = 2


@dataclass(frozen=True)
class Supposition:
    """A usual mistake of an adapter, with the line that corrects it and the change of the reference that simulates it."""

    line: str
    """What to write, and where."""
    part: str
    """The reference's modules that are altered."""
    alter: Alteration = lambda module: None
    """How each of them is altered."""
    words: dict[str, Any] = field(default_factory=dict)
    """What else the reference is trained with, in the words of reference.counterfactual."""


@dataclass(frozen=True)
class SupposedTrial:
    """The trial under suppositions that the loss of step 1 does not refute, and the results of the checks on it."""

    suppositions: tuple[Supposition, ...]
    trial: Trial
    results: tuple[Result, ...]


def judge_fitting_suppositions(trial: Trial) -> list[SupposedTrial]:
    """Return the trials under the smallest sets of suppositions that give the trainer's loss of step 1, judged.

    Sets have up to MOST_SUPPOSITIONS entries; the empty set counts. Empty if no set fits, or the trainer has no such
    loss.
    """
    observed_loss = global_loss(trial, 1)
    usual = list(suppositions(trial))
    if observed_loss is None:
        return []
    for count in range(MOST_SUPPOSITIONS + 1):
        choices = itertools.combinations(usual, count)
        fitting = [chosen for chosen in choices if _fits(trial, chosen, observed_loss)]
        if fitting:
            return [_judge_supposed(trial, chosen) for chosen in fitting]
    return []


def suppositions(trial: Trial) -> Iterator[Supposition]:
    """Yield the usual mistakes that this trial may have: other constants, heads, rows, exchanged and transposed weights."""
    from harness.reference import spellings

    model = trial.case.model
    for eps in EPSILONS:
        if eps != model.norm_eps:
            yield Supposition(f"case: model: {{norm_eps: {as_yaml(eps)}}}", "norm", spellings.with_eps(eps))
    for theta in THETAS:
        if theta != model.rope_theta:
            yield Supposition(
                f"case: model: {{rope_theta: {theta}}}", "attention", spellings.with_config_values(rope_theta=theta)
            )
    if "rows" in reference_order_arguments(trial):
        yield Supposition(
            "adapter: leave out `rows`; adjacent entries of a head turn together", "model", words={"rows": {}}
        )
    else:
        for heads, kv in _other_heads(model):
            alter = spellings.with_config_values(n_heads=heads, n_kv_heads=kv)
            yield Supposition(f"case: model: {{n_heads: {heads}, n_kv_heads: {kv}}}", "attention", alter)
        yield Supposition("adapter: def rows(self, case): return halves(case)", "attention", spellings.turn_halves)
    prefixes = {"w": "feed_forward.", "wq": "attention.", "wo": "attention.", "wk": "attention.", "wv": "attention."}
    names_to_swap = itertools.chain.from_iterable(SWAPPED)
    full_names = {name: prefixes.get(name, prefixes.get(name[:1], "")) + name for name in names_to_swap}
    for first, second in SWAPPED:
        are_ends = first == "tok_embeddings"
        alter = spellings.exchange_embedding_and_output
        if not are_ends:
            alter = partial(spellings.exchange_forwards, first_name=full_names[first], second_name=full_names[second])
        yield Supposition(f"adapter: exchange {first} and {second} in NAMES", "model" if are_ends else "block", alter)
    for names in (SQUARE[:1], SQUARE[1:], SQUARE):
        line = f"adapter: copy {' and '.join(names)} transposed, and judge with DDP only: no check covers transposed slices"
        yield Supposition(line, "block", spellings.transpose_matrices(tuple(full_names[name] for name in names)))


def _other_heads(model: ModelConfig) -> Iterator[tuple[int, int]]:
    """Yield (n_heads, n_kv_heads) of other models whose weights have the same shapes.

    Heads of two entries or fewer are left out.
    """
    kv_dim = model.n_kv_heads * model.head_dim  # which divides dim
    sizes = [size for size in range(kv_dim, 2, -2) if kv_dim % size == 0 and size != model.head_dim]
    for size in sizes:
        yield model.dim // size, kv_dim // size


# ---- the reference, as if it were so


def _reference_changes(chosen: Sequence[Supposition]) -> dict[str, Any]:
    """Return the arguments of reference.counterfactual.Changes that train the reference under these suppositions.

    "altered" is a function that alters the model once, before step 1. The others are the `words` of all suppositions; of
    equal words the last one's count.
    """
    from harness.reference.spellings import modules_of

    def alter(model: Any, step: int) -> None:
        """Alter the modules of each supposition, once, before step 1."""
        if step != 1:
            return
        for supposition in chosen:
            for name in modules_of(model, supposition.part):
                supposition.alter(model.get_submodule(name))

    changes: dict[str, Any] = {"altered": alter}
    for supposition in chosen:
        changes |= supposition.words
    return changes


def _fits(trial: Trial, chosen: Sequence[Supposition], wanted: float) -> bool:
    """Return whether the reference's loss of step 1 under these suppositions is `wanted`, within the bound, or 1e-6
    without one.
    """
    from harness.reference.counterfactual import Changes, loss_sums_of_rows

    otherwise = Changes(**(reference_order_arguments(trial) | _reference_changes(chosen)))
    losses = loss_sums_of_rows(trial.case.model, trial.case.training, trial.reference, 1, otherwise)
    try:
        bound = trial.bounds.loss[1]
    except NoBound:
        bound = 1e-6
    return bool(abs(losses.sum() / trial.reference_step(1).valid_tokens - wanted) <= bound * wanted)


def _judge_supposed(trial: Trial, chosen: tuple[Supposition, ...]) -> SupposedTrial:
    """Return the trial under these suppositions, judged.

    Its rates are those that the optimizer took, whatever they are: they are no mistake of the model.
    """
    requested = assume_case(trial, replace(trial.case, training=with_own_rates(trial)))
    assumed = assume_reference(requested, **_reference_changes(chosen))
    return SupposedTrial(chosen, assumed, judge(assumed))


def with_own_rates(trial: Trial) -> TrainingConfig:
    """Return the recipe with the rates that rank 0's optimizer took.

    Unchanged if they are the recipe's, or not all are known.
    """
    training = trial.case.training
    steps = trial.ranks[0].steps
    rates = tuple(step.lr for step in steps if step.lr is not None)
    wanted = [trial.reference_step(step.step).lr for step in steps]
    if len(rates) < training.steps or np.allclose(rates, wanted, rtol=1e-12, atol=0):
        return training
    return replace(training, rates=rates)
