"""Facts about inputs of a recording's training that are not the first recording's: parameters, weights, rows, settings.

Each is seen directly, so nothing is assumed, and what follows from it is not judged again. Facts about rows come only
if `samples` is broken, those about settings only if `recipe` is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from harness.core.causes.hypothesis import Broken, Fact
from harness.core.causes.words import shorten_names
from harness.core.evidence.text import number_text, ranks_text
from harness.core.judge.received_samples import StepSamples, shared_samples, steps_of_samples
from harness.core.judge.result import Cause
from harness.recording.judged.judge_same_training import CHECKS
from harness.recording.judged.judge_sketched import missing_ranks
from harness.recording.judged.recorded_recipe import SCALE
from harness.recording.judged.same_rows import recorded_samples_of_step
from harness.recording.judged.two_recordings import FEW, TwoRecordings
from harness.recording.sketches import WEIGHTS

ANOTHER_RECIPE = "another recipe"
BETA_KINDS = {1: "beta1", 2: "beta2"}
KINDS = {
    "learning rate": "learning rate",
    "weight_decay": "weight decay",
    "amsgrad": "amsgrad",
    "eps": "eps",
    "momentum": "momentum",
    "optimizer": ANOTHER_RECIPE,
    SCALE: "loss scale not restored",
}
"""Kinds of causes by the setting that differs; averages of AdamW have their own."""


# ---- parameters


def parameters_lost(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact on parameters that the second recording lacks, as whole layers if they are.

    Nothing where it has some under other names, or a rank left no numbers.
    """
    expected = evidence.baseline.shapes
    observed = evidence.candidate.shapes
    lost = tuple(fqn for fqn in expected if fqn not in observed)
    if not lost or {*observed} - {*expected} or missing_ranks(evidence.candidate):
        return
    layers = tuple(sorted({*map(layer_of, expected)} - {*map(layer_of, observed)} - {""}))
    cause = Cause("incomplete", f"no rank trains {shorten_names(lost, FEW)}", details=(("parameters", lost),))
    if layers and all(layer_of(fqn) in layers for fqn in lost):
        cause = Cause("layers lost", f"no rank trains {', '.join(layers)}", details=(("layers", layers),))
    yield Fact(cause, CHECKS)


def parameters_never_stepped(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact on parameters that no optimizer of the second recording steps on, though the first one's does.

    Nothing where it has some under other names, or a rank left no numbers.
    """
    baseline = evidence.baseline
    candidate = evidence.candidate
    step = min(candidate.steps, default=0)
    if not step or {*candidate.shapes} != {*baseline.shapes} or missing_ranks(candidate):
        return
    expected = {fqn for number, kind, fqn in baseline.whole if (number, kind) == (step, WEIGHTS)}
    observed = {fqn for number, kind, fqn in candidate.whole if (number, kind) == (step, WEIGHTS)}
    unknown = {fqn for number, kind, fqn in candidate.unknown if (number, kind) == (step, WEIGHTS)}
    still = tuple(fqn for fqn in baseline.shapes if fqn in expected - observed - unknown)
    if observed and still:
        details = (("step", step), ("parameters", still))
        yield Fact(Cause("incomplete", f"no optimizer steps on {shorten_names(still, FEW)}", details=details), CHECKS)


def parameters_trained_besides(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact, a symptom, on parameters that only the second recording steps on.

    Nothing where it lacks one of the first recording's parameters, or a rank of the first left no numbers.
    """
    expected = evidence.baseline.shapes
    observed = evidence.candidate.shapes
    step = min(evidence.candidate.steps, default=0)
    besides = tuple(fqn for fqn in observed if fqn not in expected and (step, WEIGHTS, fqn) in evidence.candidate.whole)
    if not besides or {*expected} - {*observed} or missing_ranks(evidence.baseline):
        return
    text = (
        f"{shorten_names(besides, FEW)}: trained here, and by the first recording not, or not under a name of its own"
    )
    hint = "is it frozen there, or tied to another one?"
    details = (("step", step), ("parameters", besides))
    yield Fact(Cause("trained besides", text, hint=hint, details=details), CHECKS, is_symptom=True)


def layer_of(fqn: str) -> str:
    """Return the name of the numbered module that a parameter is in; empty if there is none."""
    words = fqn.split(".")
    for count, word in enumerate(words, 1):
        if word.isdigit():
            return ".".join(words[:count])
    return ""


# ---- weights


def other_initial_weights(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact if weights before training are not the first recording's, and the job did not resume."""
    if "initial_weights" in broken and not evidence.baseline.after:
        text = "training does not start from the first recording's weights"
        hint = "load the same checkpoint in both, or draw weights by a seed that does not depend on the rank"
        where = evidence.parameters_text(evidence.names)
        details = (("parameters", tuple(evidence.names)),)
        yield Fact(Cause("other initial weights", text, where, hint=hint, details=details), ("initial_weights",))


# ---- rows of samples


def peers_differ(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact on tp groups whose ranks are fed different rows in the first wrong step."""
    findings = broken["samples"].findings if "samples" in broken else ()
    peers = [finding.ranks for finding in findings if finding.axis == "tp" and finding.step == evidence.step]
    if peers:
        text = f"tp peers {' '.join(map(ranks_text, peers))} are fed different rows in step {evidence.step}"
        hint = "tp ranks compute parts of the same samples: give each tp group one share of the batch"
        yield _samples_fact(evidence, "peers differ", text, hint, axis="tp", ranks=peers[0])


def microbatches_repeated(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact on ranks whose passes of the first wrong step, of which there are several, were all fed the same
    rows.
    """
    samples = _samples(evidence)
    again = []
    for rank, passes in sorted(samples.microbatches.items()):
        if len(passes) > 1 and len(samples.repeated_microbatches(rank)) == len(passes) - 1:
            again.append(rank)
    if "samples" in broken and again:
        many = len(samples.microbatches[again[0]])
        text = f"all {many} microbatches of step {evidence.step} are fed the same rows on ranks {ranks_text(again)}"
        yield _samples_fact(evidence, "microbatches repeated", text, ranks=tuple(again))


def same_samples(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact if only a part of the rows of the first wrong step is fed, each several times as often as in the
    first recording.
    """
    expected = _samples(evidence).requested
    observed = _samples(evidence).counts
    if "samples" not in broken or not {*observed} < {*expected}:
        return
    often = times_as_often(expected, observed)
    if often > 1 and all(count == often * expected[row] for row, count in observed.items()):
        several = max(expected.values()) > 1
        rows = f"of {len(expected)}{' different' if several else ''} rows of step {evidence.step}"
        text = f"{rows}, {len(observed)} are fed, each {often} times{' as often' if several else ''},"
        text += " and the others to no rank"
        hint = "give each data-parallel rank its own share of the first recording's batch"
        yield _samples_fact(evidence, "same samples", text, hint)


def samples_of_another_step(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact if all ranks with rows that are not of this step have rows of one other step alone.

    Nothing unless `samples` is broken, or if several steps fit.
    """
    if "samples" not in broken:
        return
    samples = _samples(evidence)
    ranks = sorted(samples.ranks_with_others)
    steps = steps_of_samples(evidence.baseline.rows, samples.on_ranks(ranks).counts)
    if len(steps) == 1:
        text = f"step {evidence.step} receives the samples of step {steps[0]}"
        if len(ranks) < len(samples.by_rank):
            text += f" on ranks {ranks_text(ranks)}"
        yield _samples_fact(evidence, "data position", text, of_step=steps[0], ranks=tuple(ranks))


def samples_lost(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact on rows of the first wrong step that are fed to no rank, where all others are fed as often as each
    other.
    """
    expected = _samples(evidence).requested
    observed = _samples(evidence).counts
    if "samples" in broken and observed < expected and times_as_often(expected, observed) == max(observed.values()):
        lost = sum((expected - observed).values())
        many = sum(expected.values())
        text = f"{lost} of {many} rows of step {evidence.step} are fed to no rank in this step"
        yield _samples_fact(evidence, "samples lost", text)


def samples_overlap(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact on rows that several ranks are fed in these steps, where the first recording has each once."""
    if "samples" in broken and (several := rows_of_several_ranks(evidence)):
        text = f"ranks draw overlapping samples: {several} rows of these steps are fed to several of them"
        yield _samples_fact(evidence, "samples overlap", text)


def other_samples(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact if `samples` is broken: the rows are others, of the first recording's steps or of none."""
    if "samples" not in broken:
        return
    every: set[int] = set()
    for rows in evidence.baseline.rows.values():
        every.update(rows)
    text = f"samples of step {evidence.step} are others than the first recording's"
    hint = "set the sampler's seed and the batch per rank so that both train on the same global batch"
    if evidence.step != evidence.comparison.steps[0]:
        hint = f"both are fed the same ones up to step {evidence.step - 1}"
    kind = "samples dealt otherwise" if {*_samples(evidence).counts} <= every else "samples of no step"
    yield _samples_fact(evidence, kind, text, hint)


def _samples_fact(evidence: TwoRecordings, kind: str, text: str, hint: str = "", **details: object) -> Fact:
    """Return a fact that explains `samples`, with these details and the first wrong step."""
    return Fact(Cause(kind, text, hint=hint, details=(*details.items(), ("step", evidence.step))), ("samples",))


def _samples(evidence: TwoRecordings) -> StepSamples:
    """Return the rows of the first wrong step, those of the first recording and those that ranks of the second were fed."""
    return recorded_samples_of_step(evidence.baseline, evidence.candidate, evidence.step)


def times_as_often(expected: Counter[int], observed: Counter[int]) -> int:
    """Return how often the rarest row is fed, relative to the first recording's rarest, rounded down. 0 where none is
    fed.
    """
    return min(observed.values(), default=0) // max(min(expected.values(), default=0), 1)


def rows_of_several_ranks(evidence: TwoRecordings) -> int:
    """Return how many rows are fed to several ranks in all steps. 0 unless the first recording has each row once.

    Ranks that are always fed alike count as one.
    """
    by_rank: dict[int, set[int]] = {}
    for passes in evidence.candidate.passes.values():
        for rank, rows_of_passes in passes.items():
            by_rank.setdefault(rank, set()).update(*rows_of_passes)
    expected = sum(evidence.baseline.rows.values(), Counter[int]())
    once = max(expected.values(), default=0) == 1
    return len(shared_samples({frozenset(rows) for rows in by_rank.values()})) if once else 0


# ---- settings


def other_scale(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact if the first difference of the recipe is the number that the loss is scaled by."""
    finding = broken["recipe"].findings[0] if "recipe" in broken else None
    if finding is None or finding.name != SCALE:
        return
    step = finding.step or 0
    expected = evidence.baseline.scales.get(step, ())
    observed = evidence.candidate.scales.get(step, ())
    text = f"the loss of step {step} is scaled by {_scales_text(observed)}, the first recording's by {_scales_text(expected)}"
    kind = KINDS[SCALE] if evidence.baseline.after else "another recipe"
    hint = "ranks have scales of their own" if len(observed) > len(expected) else ""
    yield Fact(Cause(kind, text, hint=hint, details=(("step", step), ("scales", observed))), ("recipe",))


def other_setting(evidence: TwoRecordings, broken: Broken) -> Iterator[Fact]:
    """Yield one fact on the first setting of the optimizer that differs from the first recording's.

    Nothing if the first difference is the scale of the loss.
    """
    finding = broken["recipe"].findings[0] if "recipe" in broken else None
    if finding is None or finding.name == SCALE:
        return
    kind = KINDS.get(finding.name, ANOTHER_RECIPE)
    if finding.name == "betas":
        expected, observed = (str(betas).strip("()").split(", ") for betas in (finding.expected, finding.observed))
        pairs = enumerate(zip(expected, observed, strict=False), 1)
        odd = [number for number, (first, second) in pairs if first != second]
        kind = BETA_KINDS[odd[0]] if len(odd) == 1 else ANOTHER_RECIPE
    yield Fact(Cause(kind, "", finding=finding), ("recipe",))


def _scales_text(scales: tuple[float, ...]) -> str:
    """Return scales in words, "8 and 16"; "nothing" for none."""
    return " and ".join(map(number_text, scales)) or "nothing"
