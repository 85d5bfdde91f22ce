"""Two recordings of what should be the same training, in two layouts: is it, and where does it first differ?

The first recording is the reference. What goes in is compared first: weights before training, samples, hyperparameters. Then,
step by step, gradients, the norm they are clipped by, the optimizer's state, and what each step adds to the weights.
The bound of a distance is the noise that a third recording shows, or a number documented for the dtype. The third recording is
of the first command with its weights altered by one rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.core.evidence.text import names_text, number_text
from harness.core.judge.finding import Bound, Finding
from harness.core.judge.result import Cause, Result, Verdict, verdict_of
from harness.recording.judged.judge_sketched import (
    Key,
    Numbers,
    Whole,
    missing_ranks,
    of_finite,
    of_shapes,
    why_unknown,
)
from harness.recording.judged.recorded_recipe import recipe
from harness.recording.judged.same_rows import peers_fed_otherwise, same_rows, with_peers
from harness.recording.judged.sketch_distances import (
    EQUAL,
    OF_UPDATES,
    Bounds,
    TensorDistance,
    apart,
    distances,
    is_too_fine,
    shows_no_jump,
    wrong_rows,
)
from harness.recording.sketches import GRADIENT, WEIGHTS

NORMS_OFF = 2.0
"""How often what torch's own norm of one gradient was off by, at most, the norm of all may be off."""
CHECKS = ("initial_weights", "samples", "recipe", "gradients", "grad_norm", "optimizer_state", "update")
"""What is judged, in the order in which one follows from the other."""
OF_NO_PARAMETER = ("samples", "recipe")
"""Those that compare no parameter."""


@dataclass(frozen=True)
class Comparison:
    """What two recordings of one training have in common."""

    results: tuple[Result, ...]
    """One for each of CHECKS."""
    differences: tuple[TensorDistance, ...] = ()
    """The differences of all tensors that both have."""
    noise: str = ""
    """Where bounds are from, for a person."""
    steps: tuple[int, ...] = ()
    """Steps that both recorded."""
    after: int = 0
    """Step of the first recording that the second goes on from."""
    scale: Mapping[str, float] = field(default_factory=dict)
    """Kind -> the largest distance relative to its bound."""

    @property
    def verdict(self) -> Verdict:
        """FAIL where a check fails; UNKNOWN where one is not judged; else PASS."""
        found = {result.verdict for result in self.results}
        return next((one for one in (Verdict.FAIL, Verdict.UNKNOWN) if one in found), Verdict.PASS)


@dataclass(frozen=True)
class SameTraining:
    """What two recordings show of one training."""

    one: Path
    """Folder of the recording that is trusted."""
    other: Path
    """Folder of the one that is judged by it."""
    comparison: Comparison
    """Results and distances."""
    cause: Cause | None
    """The first thing that differs; None where nothing does."""
    parameters: int
    """Number of parameters of the first recording."""
    common: int
    """Number of those that have the same name in the second."""
    recorded: int = 0
    """Number of steps of the first recording."""
    unproven: str = ""
    """Why nothing can be said of the whole job, such as a rank that was killed; empty if something can."""


def why_no_noise(one: Numbers, noise: Numbers) -> str:
    """Return why a recording does not show the noise of another one; empty if it does."""
    if not noise.noise:
        return "its first weights were not altered: record it with --noise"
    if is_too_fine(one, noise):
        return (
            f"it altered weights by one rounding finer than {one.computes_in}: record it with --noise {one.computes_in}"
        )
    if shows_no_jump(one, noise):
        return "no matrix of Muon was rounded to bfloat16 otherwise than in the first: record it with --noise bfloat16"
    steps = sorted({*one.steps} & {*noise.steps})
    for result in (same_rows(one, noise, steps), recipe(one, noise, steps)):
        if result.findings:
            return f"it is not the same training: {result.check} differ"
        if result.verdict is not Verdict.PASS:
            return f"whether it is the same training was not seen: {result.note}"
    if of_finite(noise).whole.keys() & of_finite(one).whole.keys() != of_finite(one).whole.keys() & noise.whole.keys():
        return "it has numbers that are not finite"
    return ""


def compared(one: Numbers, other: Numbers, noise: Numbers | None = None) -> Comparison:
    """Judge the second by the first. noise: the first, with its weights altered by one rounding."""
    one, other = of_finite(one), of_shapes(other, one.shapes)
    steps = sorted({*one.steps} & {*other.steps})
    bounds = Bounds(one, noise)
    found = [*_differences(one, other, bounds, steps)]
    results = [_initial(one, other), same_rows(one, other, steps), recipe(one, other, steps)]
    results.append(_judged("gradients", one, other, [d for d in found if d.key[1] == GRADIENT], GRADIENT, steps))
    results.append(_norms(one, other, bounds, steps))
    state = [d for d in found if d.key[1] not in (GRADIENT, WEIGHTS, OF_UPDATES)]
    results.append(_judged("optimizer_state", one, other, state, "", steps))
    updates = [d for d in found if d.key[1] == OF_UPDATES]
    results.append(_judged("update", one, other, updates, WEIGHTS, steps))
    results[1] = with_peers(results[1], peers_fed_otherwise(one, other, {d.key[0] for d in found if d.is_wrong}))
    scale: dict[str, float] = {}
    for d in found:
        scale[d.key[1]] = max(scale.get(d.key[1], 0.0), d.distance / d.bound)
    if why_no_common(one, other):
        results = [result if result.check in OF_NO_PARAMETER else _unnamed(result) for result in results]
    return Comparison(tuple(map(_honest, results)), tuple(found), bounds.how, tuple(steps), one.after, scale)


def why_no_common(one: Numbers, other: Numbers) -> str:
    """Return that no parameter has the same name in both, so that none is compared; empty if one has."""
    if not one.shapes or not other.shapes or one.shapes.keys() & other.shapes.keys():
        return ""
    has = f"the first has {names_text(tuple(one.shapes))}, the second {names_text(tuple(other.shapes))}"
    return f"no parameter has the same name in both recordings: {has}"


def _unnamed(result: Result) -> Result:
    """UNKNOWN, whatever replicas of the second recording show: its model may be another one."""
    if result.verdict is Verdict.NOT_APPLICABLE:
        return result
    return Result(result.check, Verdict.UNKNOWN, note="no parameter has the same name in both recordings")


def _honest(result: Result) -> Result:
    """Return it; UNKNOWN where it passed and examined nothing."""
    if result.verdict is Verdict.PASS and not result.examined:
        return Result(result.check, Verdict.UNKNOWN, note="nothing was examined")
    return result


def _differences(one: Numbers, other: Numbers, bounds: Bounds, steps: Iterable[int]) -> Iterator[TensorDistance]:
    order = {fqn: place for place, fqn in enumerate(one.shapes)}
    found = [(key, distance, fit) for key, distance, fit in distances(one, other) if key[0] in {*steps}]
    for key, distance, fit in sorted(found, key=lambda item: (item[0][0], item[0][1], order.get(item[0][2], 0))):
        yield TensorDistance(key, distance, fit, bounds.of(key))


# ---- what goes in


def _initial(one: Numbers, other: Numbers) -> Result:
    if one.after and one.changed.get(one.after + 1):
        note = f"the first recording's weights were changed after step {one.after}, and into what was not seen"
        return Result("initial_weights", Verdict.UNKNOWN, note=note)
    keys = [(one.after, WEIGHTS, fqn) for fqn in {**one.shapes, **other.shapes}]
    both = [key for key in keys if key in one.whole and key in other.whole]
    findings = []
    for key in both:
        distance, _ = apart(one.whole[key].sums, other.whole[key].sums)
        if not distance <= EQUAL:
            findings.append(_finding(key, distance, Bound(EQUAL), "weights that training starts with"))
    findings += _replicas(other, WEIGHTS, [one.after])
    return _doubted("initial_weights", findings, both, one, other, keys)


# ---- what comes of it


def _judged(
    name: str, one: Numbers, other: Numbers, found: list[TensorDistance], kind: str, steps: list[int]
) -> Result:
    """One check of tensors. kind: of which tensors; empty: of an optimizer's state."""
    findings = [
        _finding(
            d.key,
            d.distance,
            Bound(d.bound),
            QUANTITIES.get(d.key[1], d.key[1]),
            fit=d.fit,
            rows=wrong_rows(one, other, d),
        )
        for d in found
        if d.is_wrong
    ]
    findings += [*_left_out(one, other, kind, steps), *_replicas(other, kind, steps)]
    if not found and not findings:
        every = {key for of in (one, other) for key in of.unknown if key[0] in {*steps} and _is_of(key, kind)}
        note = why_unknown(one, sorted(every)) or why_unknown(other, sorted(every))
        note = note or "no gradients were seen as the optimizer stepped" * (kind == GRADIENT)
        note = note or f"neither step has {QUANTITIES.get(kind, 'optimizer state')} of both recordings"
        verdict = Verdict.UNKNOWN if kind or every else Verdict.NOT_APPLICABLE
        return Result(name, verdict, note=note)
    if kind == GRADIENT and not findings and not any(one.whole[d.key].length for d in found):
        note = "every gradient is zero in both recordings, which shows nothing"
        return Result(name, Verdict.UNKNOWN, len(found), note=note)
    keys = {key for of in (one, other) for key in (*of.whole, *of.unknown) if key[0] in {*steps} and _is_of(key, kind)}
    largest = max((d.distance for d in found), default=None)
    result = _doubted(name, findings, [d.key for d in found], one, other, keys)
    note = result.note
    if kind == GRADIENT and other.rescaled and result.verdict is Verdict.PASS:
        note = f"{len(found)} compared up to one factor of a step: torch's functions clip in one recording alone"
    return Result(result.check, result.verdict, result.examined, result.findings, note, largest)


def _left_out(one: Numbers, other: Numbers, kind: str, steps: list[int]) -> Iterator[Finding]:
    """Yield parameters without a gradient, or that no optimizer steps on, where others of the second recording have that."""
    for step in steps if kind else ():
        mine, theirs = ({fqn for s, k, fqn in of.whole if (s, k) == (step, kind)} for of in (one, other))
        for fqn in (fqn for fqn in one.shapes if fqn in mine - theirs and theirs):
            if (other.after, WEIGHTS, fqn) in other.whole and (step, kind, fqn) not in other.unknown:
                what = "gradient" if kind == GRADIENT else "what the step adds"
                yield Finding(step=step, kind="parameter", name=fqn, quantity=what, expected="one", observed="none")


QUANTITIES = {GRADIENT: "gradient", OF_UPDATES: "what the step adds", WEIGHTS: "weights"}


def _is_of(key: Key, kind: str) -> bool:
    return key[1] == kind if kind else key[1] not in (GRADIENT, WEIGHTS)


def _doubted(
    name: str, findings: list[Finding], both: list[Key], one: Numbers, other: Numbers, keys: Iterable[Key]
) -> Result:
    """UNKNOWN instead of PASS if a tensor was seen in one recording alone, or it is unknown which elements ranks hold."""
    result = verdict_of(name, findings, len(both))
    wanted = sorted({*keys})
    note = missing_ranks(one) or missing_ranks(other) or why_unknown(one, wanted) or why_unknown(other, wanted)
    if not note:
        alone = [key for key in wanted if (key in one.whole) != (key in other.whole)]
        names = tuple(dict.fromkeys(fqn for _, _, fqn in alone))
        note = f"{names_text(names)}: seen in one of the recordings alone" if names else ""
    if not note and not both:
        note = "nothing was examined"
    return Result(name, Verdict.UNKNOWN, len(both), note=note) if note and not findings else result


def _replicas(numbers: Numbers, kind: str, steps: list[int]) -> Iterator[Finding]:
    """Yield slices of which ranks that hold the same have different numbers."""
    for key, whole in sorted(numbers.whole.items()):
        if key[0] in {*steps} and _is_of(key, kind) and whole.replicas:
            ranks, distance = replicas_apart(whole)
            quantity = f"{QUANTITIES.get(key[1], key[1])}, compared among ranks that hold the same slice"
            yield _finding(key, distance, None, quantity, ranks=ranks)


def replicas_apart(whole: Whole) -> tuple[tuple[int, ...], float]:
    """Return the ranks of a slice of which holders have different numbers, and the largest distance from the first one's."""
    place, held = next(iter(whole.replicas.items()))
    first = held[0][1]
    return tuple(rank for rank, _ in held), max(apart(first, sums)[0] for _, sums in held)


def _norms(one: Numbers, other: Numbers, bounds: Bounds, steps: list[int]) -> Result:
    """What torch's clipping function returned, against the norm of the first recording's gradients."""
    findings, examined, largest = [], 0, 0.0
    for step in steps:
        lost = [key for key in one.unknown if key[:2] in ((step, GRADIENT), (one.after, WEIGHTS))]
        if lost and one.norms.get(step):
            return Result("grad_norm", Verdict.UNKNOWN, note=why_unknown(one, lost))
        seen = [whole.squares for (at, kind, _), whole in one.whole.items() if (at, kind) == (step, GRADIENT)]
        wanted, rule = math.sqrt(sum(seen)), one.norms.get(step)
        if not seen or not other.norms.get(step) or not rule:
            continue
        keys = [key for key in one.whole if key[:2] == (step, GRADIENT)]
        rounds = NORMS_OFF * max(numbers.norms_off.get(step, 0.0) for numbers in (one, other))
        bound = max(bounds.of(key) for key in keys) + rounds
        if (off := abs(next(iter(rule.values())) - wanted)) > bound * wanted:
            part = number_text(off / wanted, 2)
            note = f"the first recording's norm differs by {part} from that of its gradients: it clips by another one"
            return Result("grad_norm", Verdict.UNKNOWN, note=note)
        for rank, norm in sorted(other.norms[step].items()):
            examined, off = examined + 1, abs(norm - wanted) / (wanted or 1.0)
            largest = max(largest, off)
            if not off <= bound:
                findings.append(
                    Finding.at(
                        rank, wanted, norm, step=step, quantity="norm that gradients are clipped by", bound=Bound(bound)
                    )
                )
    if not examined:
        return Result(
            "grad_norm", Verdict.NOT_APPLICABLE, note="torch's functions clip nothing in one of the recordings"
        )
    return verdict_of("grad_norm", findings, examined, largest=largest)


def _finding(
    key: Key,
    distance: float,
    bound: Bound | None,
    quantity: str,
    *,
    fit: float = math.nan,
    ranks: tuple[int, ...] = (),
    rows: str = "",
) -> Finding:
    step, _, fqn = key
    note = f"{number_text(fit, 4)} times as large by best fit" if math.isfinite(fit) and abs(fit - 1) > 0.01 else ""
    note = ", ".join(filter(None, (rows, note)))
    return Finding(
        ranks=ranks,
        step=step or None,
        kind="parameter",
        name=fqn,
        quantity=quantity,
        expected="the first recording's" if bound else "the same on all of them",
        observed=distance,
        unit="of its norm",
        bound=bound,
        note=note,
    )
