"""What an adapter usually has wrong of its trainer's model, each put to the test: the reference trained as if it were so.

The adapter copies the seed weights into a model that it says is the reference's. A name, the order of rows, or a constant of
the model may be another; weights then seem right, and the forward pass is wrong. A supposition alters the reference's model
so. The loss of step 1 chooses among them, and pairs of them; the checks then judge all that there is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.checks import judge
from harness.diagnosis.assume import another_case, another_reference, order_of_entries
from harness.judge.losses import global_loss
from harness.judge.result import Result
from harness.judge.tolerance import NoBound
from harness.judge.trial import Trial
from harness.reference.config import ModelConfig, TrainingConfig

if TYPE_CHECKING:
    from harness.reference.spellings import Alter, Alteration

EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, float(np.finfo(np.float64).eps), float(np.finfo(np.float32).eps))
THETAS = (10_000.0, 500_000.0, 1_000_000.0)
SWAPPED = (
    *(("feed_forward.w1", "feed_forward.w3"), ("attention.wq", "attention.wo"), ("attention.wk", "attention.wv")),
    ("attention_norm", "ffn_norm"),
)
SQUARE = ("attention.wq", "attention.wo")
TOO_SMALL = 2  # entries of a head
MOST_TOGETHER = 2


@dataclass(frozen=True)
class Supposition:
    """says: what is so. line: what to write, and where. part, alter: of which of the reference's modules, and how it is
    altered. otherwise: how the reference is trained besides, in the words of reference.counterfactual.Otherwise."""

    says: str
    line: str
    part: str
    alter: Alteration = lambda module: None
    otherwise: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Supposed:
    """The trial under suppositions that the loss of step 1 does not refute, and what the checks say then."""

    suppositions: tuple[Supposition, ...]
    trial: Trial
    results: tuple[Result, ...]


def suppose(trial: Trial) -> list[Supposed]:
    """The fewest that give the loss of step 1; none where nothing is to be supposed, or no loss was seen."""
    wanted = global_loss(trial, 1)
    if wanted is None:
        return []
    usual = list(suppositions(trial))
    for together in range(MOST_TOGETHER + 1):
        chosen = [c for c in itertools.combinations(usual, together) if _fits(trial, c, wanted)]
        if chosen:
            return [_judged(trial, each) for each in chosen]
    return []


def suppositions(trial: Trial) -> Iterator[Supposition]:
    from harness.reference.spellings import ends_exchanged, exchange, setting, transposed, turn_halves, with_eps

    model = trial.case.model
    for eps in EPSILONS:
        if eps != model.norm_eps:
            says = f"its norms add {eps:.3g} to the mean square, requested norm_eps {model.norm_eps:.3g}"
            yield Supposition(says, f"case: model: {{norm_eps: {as_yaml(eps)}}}", "norm", with_eps(eps))
    for theta in THETAS:
        if theta != model.rope_theta:
            says = f"its rotary embedding has base {theta:.0f}, requested rope_theta {model.rope_theta:.0f}"
            yield Supposition(says, f"case: model: {{rope_theta: {theta}}}", "attention", setting(rope_theta=theta))
    if "rows" in order_of_entries(trial):
        says = "its rotary embedding rotates adjacent entries of a head, but the adapter's `rows` say otherwise"
        yield Supposition(says, "adapter: leave out `rows`", "model", otherwise={"rows": {}})
    else:
        for heads, kv_heads in _other_heads(model):
            says = f"its attention has {heads} heads and {kv_heads} K/V heads, requested {model.n_heads} and {model.n_kv_heads}"
            line = f"case: model: {{n_heads: {heads}, n_kv_heads: {kv_heads}}}"
            yield Supposition(says, line, "attention", setting(n_heads=heads, n_kv_heads=kv_heads))
        says = "its rotary embedding rotates entry i of a head with entry i + head_dim / 2, not with the next one"
        yield Supposition(says, "adapter: def rows(self, case): return halves(case)", "attention", turn_halves)
    for one, other in SWAPPED:
        yield _swapped(one, other, "block", partial(exchange, one=one, other=other))
    yield _swapped("tok_embeddings", "output", "model", ends_exchanged)
    for names in (SQUARE[:1], SQUARE[1:], SQUARE):
        says = f"it multiplies by {' and '.join(map(_last, names))} from the left: rows are inputs"
        line = "adapter: copy them transposed, and judge with DDP only: no check covers transposed slices"
        yield Supposition(says, line, "block", transposed(names))


def _other_heads(model: ModelConfig) -> Iterator[tuple[int, int]]:
    """As many as weights of the same shapes may have, which do not show it; and of keys and values. Of rows that the adapter
    puts in another order, by the heads that it knows, nothing is supposed."""
    kv_dim = model.n_kv_heads * model.head_dim  # which divides dim
    for size in range(kv_dim, TOO_SMALL, -2):
        if kv_dim % size == 0 and size != model.head_dim:
            yield model.dim // size, kv_dim // size


def as_yaml(value: float) -> str:
    """As YAML reads a number with a fraction."""
    text = repr(float(value))
    return text if "." in text else text.replace("e", ".0e")


def _swapped(one: str, other: str, part: str, alter: Alteration) -> Supposition:
    first, second = _last(one), _last(other)
    says = f"what the adapter calls {first} is the model's {second}, and vice versa"
    return Supposition(says, f"adapter: exchange {first} and {second} in NAMES", part, alter)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


# ---- the reference, as if it were so


def altered_by(chosen: Sequence[Supposition]) -> Alter:
    from harness.reference.spellings import modules_of

    def alter(model: Any, step: int) -> None:
        for each in chosen if step == 1 else ():
            for name in modules_of(model, each.part):
                each.alter(model.get_submodule(name))

    return alter


def _fits(trial: Trial, chosen: Sequence[Supposition], wanted: float) -> bool:
    """Whether the loss of step 1 is the one that the trainer computed."""
    from harness.reference.counterfactual import Otherwise, losses_of_rows

    otherwise = Otherwise(altered=altered_by(chosen), **(order_of_entries(trial) | _words(chosen)))
    losses = losses_of_rows(trial.case.model, trial.case.training, trial.reference, 1, otherwise)
    found = losses.sum() / trial.reference_step(1).valid_tokens
    return bool(abs(found - wanted) <= _close(trial) * wanted)


def _close(trial: Trial) -> float:
    try:
        return trial.bounds.loss[1]
    except NoBound:
        return 1e-6


def _words(chosen: Sequence[Supposition]) -> dict[str, Any]:
    return {key: value for each in chosen for key, value in each.otherwise.items()}


def _judged(trial: Trial, chosen: tuple[Supposition, ...]) -> Supposed:
    """With the rates that the optimizer took, whatever they are: they are no mistake of the model."""
    requested = another_case(trial, replace(trial.case, training=with_own_rates(trial)))
    assumed = another_reference(requested, altered=altered_by(chosen), **_words(chosen))
    return Supposed(chosen, assumed, judge(assumed))


def with_own_rates(trial: Trial) -> TrainingConfig:
    """The recipe, with the rates that rank 0's optimizer took where these are others."""
    training, steps = trial.case.training, trial.ranks[0].steps
    rates = tuple(step.lr for step in steps if step.lr is not None)
    wanted = [trial.reference_step(step.step).lr for step in steps]
    if len(rates) < training.steps or np.allclose(rates, wanted, rtol=1e-12, atol=0):
        return training
    return replace(training, rates=rates)
