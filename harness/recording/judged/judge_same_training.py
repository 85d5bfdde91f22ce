"""Judgement of a recording by another one of what should be the same training, in another layout: where do they first
differ?

The first recording is the reference. What goes in is compared first: weights before training, samples, hyperparameters.
Then, step by step, gradients, the norm they are clipped by, the optimizer's state, and what each step adds to the
weights. The bound of a distance is the noise that a third recording shows, or a number documented for the dtype. The
third recording is of the first command with its weights altered by one rounding.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.core.evidence.text import names_text, number_text
from harness.core.judge.finding import Bound, Finding
from harness.core.judge.result import Diagnosis, Result, Verdict, verdict_of
from harness.recording.judged.judge_sketched import (
    Key,
    Numbers,
    Whole,
    missing_ranks,
    why_unknown,
    without_nonfinite,
    without_other_shapes,
)
from harness.recording.judged.recorded_recipe import compare_recipes
from harness.recording.judged.same_rows import judge_rows, peers_with_other_rows, with_peer_findings
from harness.recording.judged.sketch_distances import (
    EQUAL,
    OF_UPDATES,
    Bounds,
    TensorDistance,
    distance_and_fit,
    distances,
    is_too_fine,
    shows_no_jump,
    wrong_rows_text,
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
    """Results of the checks that compare two recordings of one training, with all distances and their bounds."""

    results: tuple[Result, ...]
    """One for each of CHECKS."""
    bounds: Bounds
    """The largest distances that are no mistakes, and where they are from."""
    differences: tuple[TensorDistance, ...] = ()
    """The differences of all tensors that both have."""
    steps: tuple[int, ...] = ()
    """Steps that both recorded."""
    after: int = 0
    """Step of the first recording that the second goes on from."""
    scale: Mapping[str, float] = field(default_factory=dict)
    """Kind -> the largest distance relative to its bound."""

    @property
    def verdict(self) -> Verdict:
        """FAIL where a check fails; UNKNOWN where one is not judged; else PASS."""
        verdicts = {result.verdict for result in self.results}
        return next((verdict for verdict in (Verdict.FAIL, Verdict.UNKNOWN) if verdict in verdicts), Verdict.PASS)


@dataclass(frozen=True)
class SameTraining:
    """Judgement of a recording by another one: results, diagnosis, and how much of the two was compared."""

    baseline: Path
    """Folder of the recording that is trusted."""
    candidate: Path
    """Folder of the one that is judged by it."""
    comparison: Comparison
    """Results and distances."""
    diagnosis: Diagnosis | None
    """Why the second differs; None where nothing does."""
    parameters: int
    """Number of parameters of the first recording."""
    common: int
    """Number of those that have the same name in the second."""
    recorded: int = 0
    """Number of steps of the first recording."""
    unproven: str = ""
    """Why nothing can be said of the whole job, such as a rank that was killed; empty if something can."""


def why_no_noise(baseline: Numbers, noise: Numbers) -> str:
    """Return why a recording does not show the noise of another one; empty if it does.

    It must be the same training with weights altered by one rounding: not too fine a one, and with finite numbers.
    """
    if not noise.noise:
        return "its first weights were not altered: record it with --noise"
    if is_too_fine(baseline, noise):
        dtype = baseline.computes_in
        return f"it altered weights by one rounding finer than {dtype}: record it with --noise {dtype}"
    if shows_no_jump(baseline, noise):
        return "no matrix of Muon was rounded to bfloat16 otherwise than in the first: record it with --noise bfloat16"
    steps = sorted({*baseline.steps} & {*noise.steps})
    for result in (judge_rows(baseline, noise, steps), compare_recipes(baseline, noise, steps)):
        if result.findings:
            return f"it is not the same training: {result.check} differ"
        if result.verdict is not Verdict.PASS:
            return f"whether it is the same training was not seen: {result.note}"
    finite = without_nonfinite(baseline).whole.keys()
    if without_nonfinite(noise).whole.keys() & finite != finite & noise.whole.keys():
        return "it has numbers that are not finite"
    return ""


def compare_numbers(
    baseline: Numbers, candidate: Numbers, noise: Numbers | None = None, *, bounds: Bounds | None = None
) -> Comparison:
    """Return the results of all CHECKS on the second recording by the first, and the distances of their tensors.

    noise: the first, with its weights altered by one rounding. bounds: those of the same recordings without an
    assumption, if one of them is assumed to be another. Where no parameter has the same name in both, checks of
    parameters are UNKNOWN. So is a check that examined nothing.
    """
    baseline = without_nonfinite(baseline)
    candidate = without_other_shapes(candidate, baseline.shapes)
    steps = sorted({*baseline.steps} & {*candidate.steps})
    bounds = bounds or Bounds(baseline, noise)
    differences = _tensor_distances(baseline, candidate, bounds, steps)
    gradients = [distance for distance in differences if distance.key[1] == GRADIENT]
    state = [distance for distance in differences if distance.key[1] not in (GRADIENT, WEIGHTS, OF_UPDATES)]
    updates = [distance for distance in differences if distance.key[1] == OF_UPDATES]
    wrong_steps = {distance.key[0] for distance in differences if distance.is_wrong}
    peers = peers_with_other_rows(baseline, candidate, wrong_steps)
    results = [
        _compare_initial_weights(baseline, candidate),
        with_peer_findings(judge_rows(baseline, candidate, steps), peers),
        compare_recipes(baseline, candidate, steps),
        _result_of_tensors("gradients", baseline, candidate, gradients, GRADIENT, steps),
        _compare_grad_norms(baseline, candidate, bounds, steps),
        _result_of_tensors("optimizer_state", baseline, candidate, state, "", steps),
        _result_of_tensors("update", baseline, candidate, updates, WEIGHTS, steps),
    ]
    scale: dict[str, float] = {}
    for distance in differences:
        kind = distance.key[1]
        scale[kind] = max(scale.get(kind, 0.0), distance.distance / distance.bound)
    if why_no_common(baseline, candidate):
        results = [result if result.check in OF_NO_PARAMETER else _not_judged(result) for result in results]
    results = [_unknown_if_empty(result) for result in results]
    return Comparison(tuple(results), bounds, tuple(differences), tuple(steps), baseline.after, scale)


def why_no_common(baseline: Numbers, candidate: Numbers) -> str:
    """Return that no parameter has the same name in both, in words, so that none is compared. Empty if one has.

    Empty as well if one of the recordings has no parameters.
    """
    if not baseline.shapes or not candidate.shapes or baseline.shapes.keys() & candidate.shapes.keys():
        return ""
    first = names_text(tuple(baseline.shapes))
    second = names_text(tuple(candidate.shapes))
    return f"no parameter has the same name in both recordings: the first has {first}, the second {second}"


def _not_judged(result: Result) -> Result:
    """Return the result as UNKNOWN, whatever replicas of the second recording show: its model may be another one.

    NOT APPLICABLE stays.
    """
    if result.verdict is Verdict.NOT_APPLICABLE:
        return result
    return Result(result.check, Verdict.UNKNOWN, note="no parameter has the same name in both recordings")


def _unknown_if_empty(result: Result) -> Result:
    """Return the result; UNKNOWN in place of a PASS that examined nothing."""
    if result.verdict is Verdict.PASS and not result.examined:
        return Result(result.check, Verdict.UNKNOWN, note="nothing was examined")
    return result


def _tensor_distances(
    baseline: Numbers, candidate: Numbers, bounds: Bounds, steps: Iterable[int]
) -> list[TensorDistance]:
    """Return the distances of all tensors of these steps that both have, with bounds, ordered by step, kind and parameter."""
    order = {fqn: number for number, fqn in enumerate(baseline.shapes)}
    of_steps = {*steps}
    differences = []
    for key, distance, fit in distances(baseline, candidate):
        if key[0] in of_steps:
            differences.append(TensorDistance(key, distance, fit, bounds.bound(key)))
    return sorted(differences, key=lambda distance: (*distance.key[:2], order.get(distance.key[2], 0)))


# ---- what goes in


def _compare_initial_weights(baseline: Numbers, candidate: Numbers) -> Result:
    """Return whether the weights that training starts with are equal, also among replicas: a finding for each parameter
    that differs.

    After a checkpoint these are the weights after step `baseline.after`. UNKNOWN if they were changed after that step,
    or some were not seen.
    """
    after = baseline.after
    if after and baseline.changed.get(after + 1):
        note = f"the first recording's weights were changed after step {after}, and into what was not seen"
        return Result("initial_weights", Verdict.UNKNOWN, note=note)
    keys = [(after, WEIGHTS, fqn) for fqn in {**baseline.shapes, **candidate.shapes}]
    both = [key for key in keys if key in baseline.whole and key in candidate.whole]
    findings = []
    for key in both:
        distance, _ = distance_and_fit(baseline.whole[key].sums, candidate.whole[key].sums)
        if not distance <= EQUAL:
            findings.append(_finding(key, distance, Bound(EQUAL), "weights that training starts with"))
    findings += _differing_replicas(candidate, WEIGHTS, [after])
    return _unknown_if_doubted("initial_weights", findings, both, baseline, candidate, keys)


# ---- what comes of it


def _result_of_tensors(
    check: str,
    baseline: Numbers,
    candidate: Numbers,
    differences: list[TensorDistance],
    kind: str,
    steps: list[int],
) -> Result:
    """Return the result of one check of tensors: a finding for each one that is too far, missing, or differs among
    replicas.

    kind: of which tensors; empty: of an optimizer's state. UNKNOWN if a tensor is in one recording alone or all
    gradients are zero. Where nothing is compared, UNKNOWN, or NOT APPLICABLE if no optimizer keeps a state.
    """
    findings = [_finding_of(baseline, candidate, distance) for distance in differences if distance.is_wrong]
    findings += [*_missing_parameters(baseline, candidate, kind, steps), *_differing_replicas(candidate, kind, steps)]
    if not differences and not findings:
        return _nothing_compared(check, baseline, candidate, kind, steps)
    both = [distance.key for distance in differences]
    if kind == GRADIENT and not findings and not any(baseline.whole[key].length for key in both):
        note = "every gradient is zero in both recordings, which shows nothing"
        return Result(check, Verdict.UNKNOWN, len(differences), note=note)
    keys: set[Key] = set()
    for numbers in (baseline, candidate):
        keys.update(key for key in (*numbers.whole, *numbers.unknown) if _is_of_kind(key, kind, steps))
    largest = max((distance.distance for distance in differences), default=None)
    result = _unknown_if_doubted(check, findings, both, baseline, candidate, keys)
    note = result.note
    if kind == GRADIENT and candidate.rescaled and result.verdict is Verdict.PASS:
        note = f"{len(both)} compared up to one factor of a step: torch's functions clip in one recording alone"
    return Result(result.check, result.verdict, result.examined, result.findings, note, largest)


def _nothing_compared(check: str, baseline: Numbers, candidate: Numbers, kind: str, steps: list[int]) -> Result:
    """Return UNKNOWN with the reason why no tensor is compared; NOT APPLICABLE where no optimizer keeps a state."""
    unknown = sorted(key for key in {*baseline.unknown, *candidate.unknown} if _is_of_kind(key, kind, steps))
    note = why_unknown(baseline, unknown) or why_unknown(candidate, unknown)
    if not note and kind == GRADIENT:
        note = "no gradients were seen as the optimizer stepped"
    note = note or f"neither step has {QUANTITIES.get(kind, 'optimizer state')} of both recordings"
    return Result(check, Verdict.UNKNOWN if kind or unknown else Verdict.NOT_APPLICABLE, note=note)


def _missing_parameters(baseline: Numbers, candidate: Numbers, kind: str, steps: list[int]) -> Iterator[Finding]:
    """Yield a finding for each parameter without a gradient, or without an optimizer's step, that has one in the first
    recording.

    Nothing for an optimizer's state, for a step in which no parameter of the second recording has any, or for unknown
    parameters.
    """
    quantity = "gradient" if kind == GRADIENT else "what the step adds"
    for step in steps:
        expected = {key[2] for key in baseline.whole if key[:2] == (step, kind)}
        observed = {key[2] for key in candidate.whole if key[:2] == (step, kind)}
        if not kind or not observed:
            continue
        for fqn in baseline.shapes:
            known = (candidate.after, WEIGHTS, fqn) in candidate.whole and (step, kind, fqn) not in candidate.unknown
            if fqn in expected - observed and known:
                yield Finding(step=step, kind="parameter", name=fqn, quantity=quantity, expected="one", observed="none")


QUANTITIES = {GRADIENT: "gradient", OF_UPDATES: "what the step adds", WEIGHTS: "weights"}


def _is_of_kind(key: Key, kind: str, steps: Container[int]) -> bool:
    """Return whether a tensor is of these steps and this kind; empty kind: of an optimizer's state."""
    return key[0] in steps and (key[1] == kind if kind else key[1] not in (GRADIENT, WEIGHTS))


def _unknown_if_doubted(
    check: str,
    findings: list[Finding],
    both: list[Key],
    baseline: Numbers,
    candidate: Numbers,
    keys: Iterable[Key],
) -> Result:
    """Return FAIL with the findings, else PASS; UNKNOWN instead of PASS where something is in doubt.

    That is a rank without numbers, a tensor in one recording alone, elements whose place is unknown, or nothing
    examined. both: the tensors that were compared. keys: those that should have been.
    """
    result = verdict_of(check, findings, len(both))
    wanted = sorted({*keys})
    note = missing_ranks(baseline) or missing_ranks(candidate)
    note = note or why_unknown(baseline, wanted) or why_unknown(candidate, wanted)
    if not note:
        alone = [key for key in wanted if (key in baseline.whole) != (key in candidate.whole)]
        names = tuple(dict.fromkeys(fqn for _, _, fqn in alone))
        note = f"{names_text(names)}: seen in one of the recordings alone" if names else ""
    if not note and not both:
        note = "nothing was examined"
    return Result(check, Verdict.UNKNOWN, len(both), note=note) if note and not findings else result


def _differing_replicas(numbers: Numbers, kind: str, steps: list[int]) -> Iterator[Finding]:
    """Yield a finding for each tensor of which ranks that hold the same slice have different numbers."""
    for key, whole in sorted(numbers.whole.items()):
        if whole.replicas and _is_of_kind(key, kind, steps):
            ranks, distance = replica_distance(whole)
            quantity = f"{QUANTITIES.get(key[1], key[1])}, compared among ranks that hold the same slice"
            yield _finding(key, distance, None, quantity, ranks=ranks)


def replica_distance(whole: Whole) -> tuple[tuple[int, ...], float]:
    """Return the ranks of the first slice whose holders have different numbers, and the largest relative distance from
    the first holder.

    Precondition: the tensor has such a slice.
    """
    copies = next(iter(whole.replicas.values()))
    first = copies[0][1]
    return tuple(rank for rank, _ in copies), max(distance_and_fit(first, sums)[0] for _, sums in copies)


def _compare_grad_norms(baseline: Numbers, candidate: Numbers, bounds: Bounds, steps: list[int]) -> Result:
    """Return whether the norms that torch's clipping function returned are that of the first recording's gradients, on
    each rank.

    NOT APPLICABLE if torch's functions clip in no step of both. UNKNOWN if some gradients are unknown, or the first
    recording's norm is not that of its own gradients.
    """
    findings = []
    examined = 0
    largest = 0.0
    for step in steps:
        lost = [key for key in baseline.unknown if key[:2] in ((step, GRADIENT), (baseline.after, WEIGHTS))]
        if lost and baseline.norms.get(step):
            return Result("grad_norm", Verdict.UNKNOWN, note=why_unknown(baseline, lost))
        keys = [key for key in baseline.whole if key[:2] == (step, GRADIENT)]
        norms = baseline.norms.get(step)
        if not keys or not candidate.norms.get(step) or not norms:
            continue
        wanted = math.sqrt(sum(baseline.whole[key].squares for key in keys))
        rounds = NORMS_OFF * max(numbers.norms_off.get(step, 0.0) for numbers in (baseline, candidate))
        bound = max(bounds.bound(key) for key in keys) + rounds
        if (off := abs(next(iter(norms.values())) - wanted)) > bound * wanted:
            part = number_text(off / wanted, 2)
            note = f"the first recording's norm differs by {part} from that of its gradients: it clips by another one"
            return Result("grad_norm", Verdict.UNKNOWN, note=note)
        for rank, norm in sorted(candidate.norms[step].items()):
            examined += 1
            off = abs(norm - wanted) / (wanted or 1.0)
            largest = max(largest, off)
            if not off <= bound:
                quantity = "norm that gradients are clipped by"
                findings.append(Finding.at(rank, wanted, norm, step=step, quantity=quantity, bound=Bound(bound)))
    if not examined:
        note = "torch's functions clip nothing in one of the recordings"
        return Result("grad_norm", Verdict.NOT_APPLICABLE, note=note)
    return verdict_of("grad_norm", findings, examined, largest=largest)


def _finding_of(baseline: Numbers, candidate: Numbers, distance: TensorDistance) -> Finding:
    """Return the finding of a tensor that is too far from the first recording's, with wrong rows and the factor of
    best fit."""
    quantity = QUANTITIES.get(distance.key[1], distance.key[1])
    rows = wrong_rows_text(baseline, candidate, distance)
    return _finding(distance.key, distance.distance, Bound(distance.bound), quantity, fit=distance.fit, rows=rows)


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
    """Return a finding on the distance of one tensor, in parts of its norm. bound: None for a comparison among
    replicas.

    fit: factor of best fit, noted if it is off by more than 1 percent. rows: text on the rows that are wrong.
    """
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
