"""The only place that says how close is close. Bounds are derived here, shown in messages, never passed in by a caller.

Exact tier (float64). A correct layout does the same arithmetic as one device in another order of summation.
Rounding errors of an inner product of n terms grow like LAMBDA * sqrt(n) * u with overwhelming probability; u is the unit
roundoff. (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 2019.)
A quantity behind a chain of `depth` such matmuls carries sqrt(depth) times that.

    gamma = LAMBDA * sqrt(depth * n) * u .

n is the longest sum (tokens of the step, vocabulary, width). depth counts the matmuls: 7 a layer and 1 for the
output going forward, twice as many going backward. All relative errors are relative to the largest entry.

After an optimizer step the parameters differ by what the optimizer makes of gamma. SGD multiplies by lr. AdamW divides
by sqrt(v), entry by entry, so it magnifies the noise of entries whose gradients are small. These are small by cancellation,
so their noise is that of a typical entry of the same parameter (rms of those that are not zero).

    |delta theta_i| <= lr * gamma * rms(g) / (sqrt(v_i) + eps) .

Muon divides a matrix by its length and applies a polynomial to its singular values, whose slope is at most 485. So what is
off by gamma of its length is then off by 485 gamma of a length of 1. The difference lies in all entries, and lr multiplies it.

The next loss moves by at most sum |g_i| |delta theta_i| . The next gradients move by at most |delta theta| times the curvature
seen along the reference's own path, |g' - g| / |theta' - theta| . Everything needed is in the reference's
evidence. Correct runs measured about 1/30 of gamma. Real mistakes start at 1e-8; a recipe whose bounds reach that
(many steps of AdamW with a tiny eps) is not judged at all rather than judged bluntly.

Measured tier (anything narrower, and quantized matmuls). Nothing derived is near the truth: bfloat16's worst case is a
hundred times what happens, and 8-bit rounding jumps. So the reference is repeated 16 times in other orders of summation
(reference/noise.py). The bound is FACTOR times the largest distance that a repeat had from it up to that step.

A correct layout is one more repeat. It would lie beyond the largest of 16 once in 17 times; how far beyond depends on
the distribution. The worst one seen is that of losses and norms, whose error is one number with a normal distribution.
Gradients' worst entry is one of thousands, and hardly varies. For losses and norms the chance to lie beyond 4 times the
largest of 16 is 1e-6 (of 8: 1e-4; beyond 3 times the largest of 16: 3e-5). With three numbers a step, three steps and
twenty cases, this is one false alarm in 4,000 runs of a matrix. FACTOR is 4 for every recipe. Two things a spread cannot
show are added. No distance is less than one unit of the last place in which losses and norms are reported. Quantized
matmuls' rare jumps are made frequent in the repeats.

One bound on the worst entry of all parameters is blunt. In bfloat16 it is 5 to 10 % of the largest entry, and hides a
gradient 2 % too large. So each parameter's whole gradient g is compared with the reference's g_ref in two more numbers.

    fit        <g, g_ref> / <g_ref, g_ref> - 1     the best-fitting factor: roundings of all entries cancel, factors do not.
    distance   ||g - g_ref|| / ||g_ref||           root mean square: roundings add up, and hardly vary from run to run.

The fit is again one number with a normal distribution, and there is one for every parameter. 12 cases of tier default,
21 parameters and 3 steps are 756 numbers, 108 cases of all tiers 8,700. Beyond 5 times the largest of 16 the chance is
7.4e-8: one false alarm in 18,000 runs of the matrix, and in 1,500 of all tiers. With 4 it would be one in 90. So FIT_FACTOR
is 5. The distance in step 1 is a mean over 64 entries at least. Within one way of cutting its standard deviation was at
most 0.13 of it, so that twice the largest is 8 of them away. So it is FIRST_FACTOR, 2. From step 2 on the optimizer has
acted, and AdamW magnifies the noise of few entries; quantized matmuls jump. There the distance has FACTOR, like all others.
32 more runs each of ten recipes and ways of cutting, 40,320 numbers, were tried; none was beyond 0.61 of its bound. Over
the largest of 16, a distance was at most 1.23 in step 1 and 1.9 later (float32), a fit 2.2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.core.case.case import Case
from harness.core.judge.finding import Bound
from harness.core.judge.golden import accept_case_command
from harness.reference.config import TrainingConfig, rule_of
from harness.reference.muon import SMALLEST_LENGTH, STEEPEST_SLOPE, learning_rate_factor, matrix_to_orthogonalise
from harness.reference.record import Noise, ReferenceRun, ReferenceStep

LAMBDA = 8.0
SMALLEST_MISTAKE = 1e-8
FACTOR = 4.0
FIT_FACTOR = 5.0  # of a parameter's best-fitting factor
FIRST_FACTOR = 2.0  # of the distance of a parameter's whole gradient in step 1, if nothing is quantized
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8}


class NoBound(ArithmeticError):
    """No useful bound can be given; the message says why."""


@dataclass(frozen=True)
class ParameterBounds:
    """The bounds of one parameter's whole gradient, by step."""

    distance: dict[int, float]
    """Largest relative distance from the reference's gradient."""
    fit: dict[int, float]
    """Largest difference of the best-fitting factor from 1."""


@dataclass(frozen=True)
class Bounds:
    """The largest relative differences that rounding explains, by step (from 1).

    gradient: of an entry, relative to the parameter's largest. how: where the numbers come from, "" if they are
    derived. by_parameter: by fqn, of measured bounds only.
    """

    loss: dict[int, float]
    gradient: dict[int, float]
    grad_norm: dict[int, float]
    how: str = ""
    by_parameter: dict[str, ParameterBounds] = field(default_factory=dict)

    def finding_bound(self, bound: float, factor: float = FACTOR) -> Bound:
        """Return a bound as a finding stores it, with its derivation. factor: by which the noise was multiplied."""
        return Bound(bound, f"{factor:g} x {self.how}" if self.how else "")


def relative_rounding(case: Case, products_per_layer: int) -> float:
    """Return the relative rounding of a quantity behind all matmuls of the model: `gamma` of this module's docstring.

    products_per_layer: 7 for forward, 21 for forward and backward.
    """
    model = case.model
    training = case.training
    longest = max(training.global_batch * training.seq_len, model.vocab_size, model.dim, model.ffn_dim)
    depth = products_per_layer * model.n_layers + products_per_layer // 7
    return LAMBDA * math.sqrt(depth * longest) * UNIT_ROUNDOFF[training.dtype]


def bounds_of_recipe(
    case: Case, reference: ReferenceRun, noise: Noise | None = None, *, before: tuple[ReferenceStep, ...] = ()
) -> Bounds:
    """Return the bounds of every step of a run of this recipe. Raises NoBound.

    Exact cases have derived bounds, all others measured ones. noise: the reference's own; None if it was never
    measured. before: the steps that trained the weights that the run starts from, whose roundings it inherits. Measured
    noise contains them already.
    """
    return derived_bounds(case, reference, before) if case.has_derived_bounds else measured_bounds(case, noise)


def measured_bounds(case: Case, noise: Noise | None) -> Bounds:
    """Return the bounds of a recipe with noise, by step: factors times the largest distances of the repeats.

    No distance counts as less than a unit in the last place. Raises NoBound if the noise was not measured, or has a
    NaN.
    """
    if noise is None:
        accept = f"`{accept_case_command(case)}` measures it"
        raise NoBound(f"the noise of this recipe's reference was never measured; {accept}")
    if not noise.finite:
        raise NoBound("a repeat of the reference has a NaN")
    unit = 2 * UNIT_ROUNDOFF["float64" if case.training.dtype == "float64" else "float32"]

    def by_step(spread: tuple[float, ...], factor: Callable[[int], float] = lambda step: FACTOR) -> dict[int, float]:
        return {step: factor(step) * max(largest, unit) for step, largest in enumerate(spread, start=1)}

    by_parameter = {
        fqn: ParameterBounds(
            by_step(spread, functools.partial(distance_factor, case)), by_step(noise.fit[fqn], lambda step: FIT_FACTOR)
        )
        for fqn, spread in noise.distance.items()
    }
    how = f"the spread of {noise.repeats} repeats of the reference"
    return Bounds(by_step(noise.loss), by_step(noise.gradient), by_step(noise.grad_norm), how, by_parameter)


def distance_factor(case: Case, step: int) -> float:
    """Return the number by which a parameter's largest distance in the repeats is multiplied to get its bound."""
    return FIRST_FACTOR if step == 1 and not case.training.quantize else FACTOR


def derived_bounds(case: Case, reference: ReferenceRun, before: tuple[ReferenceStep, ...] = ()) -> Bounds:
    """Return the bounds of a float64 recipe, from the reference's own path. Those of the norm are those of gradients.

    Raises NoBound where rounding alone explains more than the smallest mistake, or where the path is not finite.
    """
    loss, gradient = _bounds_by_step(case, reference, before)
    if not all(map(math.isfinite, (*loss.values(), *gradient.values()))):
        raise NoBound("the reference's own path has a NaN or an infinite number")
    if max(*loss.values(), *gradient.values()) >= SMALLEST_MISTAKE:
        raise NoBound(_blunt_bounds_text(case, reference, loss, gradient, before))
    return Bounds(loss, gradient, gradient)


def _bounds_by_step(
    case: Case, reference: ReferenceRun, before: tuple[ReferenceStep, ...] = ()
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the relative bounds of (loss, gradients), each by step, steps of `before` included.

    Differences of parameters by rounding add up from step to step.
    """
    forward_rounding = relative_rounding(case, 7)
    backward_rounding = relative_rounding(case, 21)
    loss = {}
    gradient = {}
    loss_drift = gradient_drift = 0.0
    steps = (*before, *reference.steps)
    for step, following in zip(steps, (*steps[1:], None), strict=True):
        loss[step.step] = forward_rounding + loss_drift
        gradient[step.step] = backward_rounding + gradient_drift
        if following is not None:
            noise = {fqn: _parameter_noise(step, fqn, backward_rounding, case.training) for fqn in step.gradients}
            loss_change = sum(float(np.sum(np.abs(following.gradients[fqn]) * noise[fqn])) for fqn in noise)
            loss_drift += loss_change / following.loss
            noise_length = math.sqrt(sum(float(np.sum(entries * entries)) for entries in noise.values()))
            gradient_drift += _curvature(step, following) * noise_length
    return loss, gradient


def _blunt_bounds_text(
    case: Case,
    reference: ReferenceRun,
    loss: dict[int, float],
    gradient: dict[int, float],
    before: tuple[ReferenceStep, ...],
) -> str:
    """Return a text of how much rounding explains at most, and of the changes to the case that would make it less."""
    largest = {step: max(loss[step], gradient[step]) for step in loss}
    sharp_steps = [step for step in largest if largest[step] < SMALLEST_MISTAKE]
    by_step = f"{max(largest.values()):.1e} by step {max(largest)}"
    text = f"rounding alone explains {by_step}, and mistakes start at {SMALLEST_MISTAKE:.0e}"
    remedies = []
    if sharp_steps:
        last_sharp = max(sharp_steps)
        remedies.append(f"`steps: {last_sharp}` ({largest[last_sharp]:.1e})")
    if case.training.optimizer == "adamw" and (eps := _smallest_sharp_eps(case, reference, before)):
        remedies.append(
            f"a larger `eps: {eps:.0e}` (AdamW divides noise by sqrt(v) + eps, now {case.training.eps:.0e})"
        )
    remedies.append("`--dtype float32`, whose bounds are measured rather than derived")
    return f"{text}; what helps: {', or '.join(remedies)}"


def _smallest_sharp_eps(case: Case, reference: ReferenceRun, before: tuple[ReferenceStep, ...]) -> float | None:
    """Return the smallest power of ten, above the recipe's eps, that as eps makes the bounds sharp.

    None if none below 1 does.
    """
    for exponent in range(-12, 0):
        eps = 10.0**exponent
        if eps <= case.training.eps:
            continue
        changed_case = dataclasses.replace(case, training=dataclasses.replace(case.training, eps=eps))
        bounds_of_numbers = _bounds_by_step(changed_case, reference, before)
        if max(max(by_step.values()) for by_step in bounds_of_numbers) < SMALLEST_MISTAKE:
            return eps
    return None


def _parameter_noise(step: ReferenceStep, fqn: str, noise: float, training: TrainingConfig) -> np.ndarray:
    """Return the bound on the change of each entry of a parameter by one optimizer step with gradients off by `noise`.

    noise: relative to a typical entry. An entry that never had a gradient has none under AdamW.
    """
    gradient = step.gradients[fqn]
    clip = clip_coefficient(step.grad_norm, training.max_norm)
    present = gradient[gradient != 0]
    largest = noise * clip * float(np.sqrt(np.mean(present * present))) if present.size else 0.0
    rule = rule_of(training, fqn)
    if rule == "sgd":
        return np.full_like(gradient, step.lr * largest)
    if rule == "muon":
        average = step.optimizer_state[fqn]["momentum_buffer"]
        update = matrix_to_orthogonalise(
            average, clip * gradient, momentum=training.momentum, nesterov=training.nesterov
        )
        summands = (average, (1 - training.momentum) * clip * gradient, update)
        lengths = [float(np.linalg.norm(summand)) for summand in summands]
        orthogonal_noise = STEEPEST_SLOPE * noise * sum(lengths) / max(lengths[-1], SMALLEST_LENGTH)
        rate = step.lr * learning_rate_factor(gradient.shape, training.adjust_lr)
        return np.full_like(gradient, rate * orthogonal_noise / math.sqrt(gradient.size))
    second = step.optimizer_state[fqn]["exp_avg_sq"] / (1 - training.beta2**step.step)
    # An entry without any gradient so far (an unused token's row) has none on any layout: its noise is zero.
    return np.where(second > 0, step.lr * largest / (np.sqrt(second) + training.eps), 0.0)


def _curvature(step: ReferenceStep, following: ReferenceStep) -> float:
    """Return the largest relative change of a gradient between two steps, per unit that the parameters moved.

    The change is relative to the parameter's largest gradient entry in the first step. If all entries were zero, that
    of the following step is taken, to which the bound applies. 0 if the parameters did not move.
    """
    squares = [np.sum((following.parameters[fqn] - step.parameters[fqn]) ** 2) for fqn in step.parameters]
    distance = math.sqrt(float(np.sum(squares)))
    changes = []
    for fqn, gradient in step.gradients.items():
        largest_entry = max_abs(gradient) or max_abs(following.gradients[fqn])
        changes.append(relative_difference(following.gradients[fqn], gradient, largest_entry))
    largest_change = max(changes)
    return largest_change / distance if distance else 0.0


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return the number, at most 1, by which clipping multiplies gradients of this norm. 1 if max_norm is None.

    The 1e-6 is torch.nn.utils.clip_grad_norm_'s.
    """
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def relative_difference(observed: np.ndarray, expected: np.ndarray, scale: float | None = None) -> float:
    """Return the largest |observed - expected| over the largest |expected|, or over `scale` if given.

    inf for a NaN, for another shape, or for a difference where the scale is 0. 0 for empty arrays.
    """
    if observed.shape != expected.shape:
        return math.inf
    if observed.size == 0:
        return 0.0
    difference = float(np.max(np.abs(observed - expected)))
    if scale is None:
        scale = float(np.max(np.abs(expected)))
    if not math.isfinite(difference):
        return math.inf
    if scale:
        return difference / scale
    return 0.0 if difference == 0 else math.inf


def max_abs(value: np.ndarray) -> float:
    """Return the largest absolute entry; 0 for an empty array."""
    return float(np.max(np.abs(value), initial=0.0))


def orthogonal_bound(case: Case, shape: Sequence[int], cancelled: float) -> float:
    """Return the absolute bound on an entry of a matrix that Muon orthogonalised, from observed gradients.

    cancelled: length of all that was averaged over that of the average. Newton-Schulz magnifies a difference by up to
    STEEPEST_SLOPE, and the roundings within it as well. The difference is spread over all entries.
    """
    roundings = 64 + LAMBDA * math.sqrt(max(shape))
    difference = roundings * UNIT_ROUNDOFF[case.training.dtype] * STEEPEST_SLOPE * (1 + cancelled)
    return LAMBDA * difference / math.sqrt(math.prod(shape))


def update_bound(case: Case, magnitude: np.ndarray) -> np.ndarray:
    """Return the absolute bound on parameters recomputed from the observed gradients, entry by entry.

    It covers a dozen roundings an entry, and those of the clipping norm. magnitude: the sum of the absolute values of
    all that was added up, entry by entry.
    """
    return (64 + LAMBDA * math.sqrt(case.model.numel)) * UNIT_ROUNDOFF[case.training.dtype] * magnitude
