"""What an adapter usually has wrong of its trainer's model, each put to the test: the reference trained as if it were so.

The adapter copies the seed weights into a model that it says is the reference's. A name, the order of rows, or a constant of
the model may be another; weights then seem right, and the forward pass is wrong. A supposition says what the trainer's model
makes of the same weights. The loss of step 1 chooses among them, and pairs of them; the laws then judge all that there is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.checks import judge
from harness.diagnosis.assume import another_case
from harness.judge.order import reordered_reference
from harness.judge.result import Result
from harness.judge.tolerance import NoBound
from harness.judge.trial import Trial
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.record import ReferenceRun, ReferenceStep

Arrays = dict[str, np.ndarray]
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, float(np.finfo(np.float64).eps), float(np.finfo(np.float32).eps))
THETAS = (10_000.0, 500_000.0, 1_000_000.0)
SWAPPED = (
    *(("feed_forward.w1", "feed_forward.w3"), ("attention.wq", "attention.wo"), ("attention.wk", "attention.wv")),
    *(("attention_norm", "ffn_norm"), ("tok_embeddings", "output")),
)
SQUARE = ("attention.wq", "attention.wo")
MOST_TOGETHER = 2


@dataclass(frozen=True)
class Supposition:
    """says: what is so. line: what to write, and where. model: the constants of the trainer's model. turned: by the reference's
    names, what its parameters are in a model that was given these arrays; back: the inverse, of weights as of gradients."""

    says: str
    line: str
    model: Callable[[ModelConfig], ModelConfig] = lambda model: model
    turned: Callable[[Arrays], Arrays] = dict
    back: Callable[[Arrays], Arrays] = dict


@dataclass(frozen=True)
class Supposed:
    """The trial under suppositions that the loss of step 1 does not refute, and what the laws say then."""

    suppositions: tuple[Supposition, ...]
    trial: Trial
    results: tuple[Result, ...]


def suppose(trial: Trial, reference: ReferenceRun) -> list[Supposed]:
    """The fewest that give the loss of step 1; none where nothing is to be supposed, or no loss was seen. reference: as it
    was trained, in its own order of rows."""
    wanted = first_loss(trial)
    if wanted is None:
        return []
    usual = list(suppositions(trial))
    for together in range(MOST_TOGETHER + 1):
        chosen = [c for c in itertools.combinations(usual, together) if _fits(trial, reference, c, wanted)]
        if chosen:
            return [_judged(trial, reference, each) for each in chosen]
    return []


def first_loss(trial: Trial) -> float | None:
    """The mean over all valid tokens of step 1, of what the ranks computed."""
    parts = [part for evidence in trial.ranks.values() for step in evidence.steps[:1] for part in step.microbatches]
    if not parts or any(part.loss_sum is None or not part.valid_tokens for part in parts):
        return None
    return sum(part.loss_sum or 0.0 for part in parts) / sum(part.valid_tokens or 0 for part in parts)


def suppositions(trial: Trial) -> Iterator[Supposition]:
    model = trial.case.model
    for eps in EPSILONS:
        if eps != model.norm_eps:
            says = f"its norms add {eps:.3g} to the mean square, requested norm_eps {model.norm_eps:.3g}"
            yield Supposition(says, f"case: model: {{norm_eps: {_float(eps)}}}", _constant(norm_eps=eps))
    for theta in THETAS:
        if theta != model.rope_theta:
            says = f"its rotary embedding has base {theta:.0f}, requested rope_theta {model.rope_theta:.0f}"
            yield Supposition(says, f"case: model: {{rope_theta: {theta}}}", _constant(rope_theta=theta))
    yield _rotary(trial)
    for one, other in SWAPPED:
        yield _swapped(one, other)
    for names in ((SQUARE[0],), (SQUARE[1],), SQUARE):
        yield _transposed(names)


def _float(value: float) -> str:
    """As YAML reads it."""
    text = f"{value!r}"
    return text if "." in text else text.replace("e", ".0e")


def _constant(**constants: float) -> Callable[[ModelConfig], ModelConfig]:
    return lambda model: replace(model, **constants)  # type: ignore[arg-type]


def _rotary(trial: Trial) -> Supposition:
    """Halves where the adapter says nothing, neighbours where it says halves."""
    rows = {fqn: order for evidence in trial.ranks.values() for fqn, order in evidence.rows.items()}
    if rows:
        says = "its rotary embedding turns neighbours in a head, the adapter's `rows` say otherwise"
        return Supposition(says, "adapter: leave out `rows`", turned=lambda arrays: _ordered(arrays, rows), back=dict)
    order = _halves(trial.case.model)
    undone = {fqn: np.argsort(rows) for fqn, rows in order.items()}
    return Supposition(
        "its rotary embedding turns entry i of a head with entry i + head_dim / 2, not its neighbour",
        "adapter: def rows(self, case): return halves(case)",
        turned=lambda arrays: _ordered(arrays, undone),
        back=lambda arrays: _ordered(arrays, order),
    )


def _halves(model: ModelConfig) -> dict[str, np.ndarray]:
    size, shapes = model.head_dim, model.parameter_shapes()
    head = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
    names = [fqn for fqn in shapes if fqn.endswith(("attention.wq.weight", "attention.wk.weight"))]
    return {fqn: (np.arange(0, shapes[fqn][0], size)[:, None] + head).reshape(-1) for fqn in names}


def _ordered(arrays: Arrays, rows: dict[str, np.ndarray]) -> Arrays:
    return {fqn: array[rows[fqn]] if fqn in rows else array for fqn, array in arrays.items()}


def _swapped(one: str, other: str) -> Supposition:
    def renamed(fqn: str) -> str:
        for name, instead in ((one, other), (other, one)):
            if f".{fqn}".endswith(f".{name}.weight"):
                return fqn.replace(name, instead)
        return fqn

    def swap(arrays: Arrays) -> Arrays:
        return {fqn: arrays[renamed(fqn)] for fqn in arrays}

    last = [name.rpartition(".")[2] for name in (one, other)]
    says = f"what the adapter calls {last[0]} is the model's {last[1]}, and the other way round"
    return Supposition(says, f"adapter: exchange {last[0]} and {last[1]} in NAMES", turned=swap, back=swap)


def _transposed(names: Sequence[str]) -> Supposition:
    def turn(arrays: Arrays) -> Arrays:
        return {
            fqn: array.T if fqn.endswith(tuple(f"{n}.weight" for n in names)) else array
            for fqn, array in arrays.items()
        }

    who = " and ".join(name.rpartition(".")[2] for name in names)
    line = "adapter: copy them transposed, and judge with DDP only: no law knows transposed slices"
    return Supposition(f"{who} multiplies from the left: rows are what it receives", line, turned=turn, back=turn)


# ---- the reference, as if it were so


def _fits(trial: Trial, reference: ReferenceRun, chosen: Sequence[Supposition], wanted: float) -> bool:
    """Whether the loss of step 1 is the one that the trainer computed."""
    from harness.reference.counterfactual import Batch, token_losses
    from harness.reference.data import step_length
    from harness.reference.model import llama_from
    from harness.reference.precision import DTYPES

    training = trial.case.training
    model = llama_from(_turned(reference.weights, chosen), config=_model(trial, chosen), dtype=DTYPES[training.dtype])
    rows = [reference.sample_ids.index(id_) for id_ in reference.samples[0]]
    length = step_length(training, 1)
    batch = Batch(reference.tokens[rows, :length], reference.labels[rows, :length])
    losses = token_losses(model, batch, training.document_mask).detach().double().numpy()
    found = float(losses.sum() / (batch.labels >= 0).sum())
    return abs(found - wanted) <= _close(trial) * abs(wanted)


def _close(trial: Trial) -> float:
    try:
        return trial.bounds.loss[1]
    except NoBound:
        return 1e-6


def _model(trial: Trial, chosen: Sequence[Supposition]) -> ModelConfig:
    model = trial.case.model
    for each in chosen:
        model = each.model(model)
    return model


def _turned(weights: Arrays, chosen: Sequence[Supposition]) -> Arrays:
    for each in chosen:
        weights = each.turned(weights)
    return weights


def _judged(trial: Trial, reference: ReferenceRun, chosen: tuple[Supposition, ...]) -> Supposed:
    """With the rates that the optimizer took, whatever they are: they are no mistake of the model."""
    model, training = _model(trial, chosen), with_own_rates(trial)
    supposed = trained(model, training, reference, chosen)
    rows = {fqn: order for evidence in trial.ranks.values() for fqn, order in evidence.rows.items()}
    undoes_rows = any("leave out `rows`" in each.line for each in chosen)
    ordered = reordered_reference(supposed, {} if undoes_rows else rows)
    assumed = replace(another_case(trial, replace(trial.case, model=model, training=training)), reference=ordered)
    return Supposed(chosen, assumed, judge(assumed))


def with_own_rates(trial: Trial) -> TrainingConfig:
    """The recipe, with the rates that rank 0's optimizer took where these are others."""
    training, steps = trial.case.training, trial.ranks[0].steps
    rates = tuple(step.lr for step in steps if step.lr is not None)
    wanted = [trial.reference_step(step.step).lr for step in steps]
    if len(rates) < training.steps or np.allclose(rates, wanted, rtol=1e-12, atol=0):
        return training
    return replace(training, rates=rates)


def trained(
    model: ModelConfig, training: TrainingConfig, reference: ReferenceRun, chosen: Sequence[Supposition]
) -> ReferenceRun:
    """The reference with such a model, and all it has under the names and in the order in which the trainer has it."""
    from harness.reference.train import train

    run = train(model, training, weights=_turned(reference.weights, chosen))
    run = replace(run, noise=reference.noise)
    for each in reversed(chosen):
        run = _back(run, each)
    return run


def _back(run: ReferenceRun, each: Supposition) -> ReferenceRun:
    if each.back is dict and each.turned is dict:
        return run
    steps = tuple(_step_back(step, each) for step in run.steps)
    return replace(
        run, weights=each.back(run.weights), steps=steps, sample_gradients={}, sample_positions={}, part_gradients={}
    )


def _step_back(step: ReferenceStep, each: Supposition) -> ReferenceStep:
    keys = next(iter(step.optimizer_state.values()), {})
    moments = {key: each.back({fqn: state[key] for fqn, state in step.optimizer_state.items()}) for key in keys}
    state = {fqn: {key: moments[key][fqn] for key in moments} for fqn in step.optimizer_state}
    return dataclasses.replace(
        step, gradients=each.back(step.gradients), parameters=each.back(step.parameters), optimizer_state=state
    )
