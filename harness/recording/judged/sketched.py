"""Why two recordings are not the same training: the first thing that differs, and what it is where sketches show it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from harness.core.causes.words import some
from harness.core.evidence.text import number_text, ranks_text
from harness.core.judge.result import Cause, Result, Verdict
from harness.recording.judged.judge_same_training import Comparison
from harness.recording.judged.judge_sketched import Numbers, missing_ranks
from harness.recording.judged.recorded_recipe import SCALE
from harness.recording.judged.same_rows import without_padding
from harness.recording.judged.sketched_gradients import FEW, gradients_cause, in_words
from harness.recording.judged.sketched_resumed import other_weights, schedule_again
from harness.recording.judged.sketched_steps import other_norm, stepped_otherwise
from harness.recording.sketches import WEIGHTS

KINDS = {
    "learning rate": "learning rate",
    "weight_decay": "weight decay",
    "amsgrad": "amsgrad",
    "eps": "eps",
    "momentum": "momentum",
    "optimizer": "another recipe",
    SCALE: "loss scale not restored",
}
"""Kinds of causes by the setting that differs; averages of AdamW have their own."""


def cause_of(one: Numbers, other: Numbers, found: Comparison) -> Cause | None:
    """Return the first thing that differs; None where nothing does. What follows from it is in `explains`."""
    failed = [result for result in found.results if result.verdict is Verdict.FAIL]
    if not failed:
        return None
    looks = {
        "initial_weights": _weights,
        "samples": _samples,
        "recipe": _recipe,
        "gradients": gradients_cause,
        "grad_norm": other_norm,
        "optimizer_state": stepped_otherwise,
        "update": stepped_otherwise,
    }
    if lost := _untrained(one, other):
        return replace(lost, explains=tuple(result.check for result in failed))
    first = min(failed, key=lambda result: (_first_step(result), not _of_scale(result), [*looks].index(result.check)))
    cause = looks[first.check](one, other, found, first)
    if cause.kind == "not explained":
        cause = _trained_besides(one, other) or cause
    later = [result.check for result in failed if result is not first and _first_step(result) >= _first_step(first)]
    return replace(cause, explains=(first.check, *later))


def _of_scale(result: Result) -> bool:
    """A scale that is too large leaves steps out: samples are those of other steps then, and gradients as well."""
    return any(one.name == SCALE and one.step == _first_step(result) for one in result.findings)


def _untrained(one: Numbers, other: Numbers) -> Cause | None:
    """Parameters that the second recording lacks, or never steps on; None where it has some under other names, or a rank left
    nothing."""
    lost = tuple(fqn for fqn in one.shapes if fqn not in other.shapes)
    if {*other.shapes} - {*one.shapes} or missing_ranks(other):
        return None
    layers = sorted({*map(_layer, one.shapes)} - {*map(_layer, other.shapes)} - {""})
    if layers and all(_layer(fqn) in layers for fqn in lost):
        return Cause("layers lost", f"no rank trains {', '.join(layers)}", details=(("layers", tuple(layers)),))
    if lost:
        return Cause("incomplete", f"no rank trains {some(lost, FEW)}", details=(("parameters", lost),))
    step = min(other.steps, default=0)
    stepped, wanted = ({fqn for s, kind, fqn in of.whole if (s, kind) == (step, WEIGHTS)} for of in (other, one))
    still = tuple(fqn for fqn in one.shapes if fqn in wanted - stepped and (step, WEIGHTS, fqn) not in other.unknown)
    if not step or not stepped or not still:
        return None
    return Cause(
        "incomplete", f"no optimizer steps on {some(still, FEW)}", details=(("step", step), ("parameters", still))
    )


def _trained_besides(one: Numbers, other: Numbers) -> Cause | None:
    """Parameters that the second recording steps on and the first one does not, where all of the first one's are in both."""
    more, step = [fqn for fqn in other.shapes if fqn not in one.shapes], min(other.steps, default=0)
    besides = tuple(fqn for fqn in more if (step, WEIGHTS, fqn) in other.whole)
    if not besides or {*one.shapes} - {*other.shapes} or missing_ranks(one):
        return None
    text = f"{some(besides, FEW)}: trained here, and by the first recording not, or not under a name of its own"
    details = (("step", step), ("parameters", besides))
    return Cause("trained besides", text, hint="is it frozen there, or tied to another one?", details=details)


def _layer(fqn: str) -> str:
    """Return the name of the numbered module that a parameter is in; empty if there is none."""
    words = fqn.split(".")
    return ".".join(words[: next((at + 1 for at, word in enumerate(words) if word.isdigit()), 0)])


def _first_step(result: Result) -> int:
    return min((finding.step or 0 for finding in result.findings), default=0)


def _names(result: Result, step: int) -> list[str]:
    names = (one.name for one in result.findings if one.kind == "parameter" and (one.step or 0) == step)
    return list(dict.fromkeys(names))


# ---- what goes in


def _weights(one: Numbers, other: Numbers, found: Comparison, result: Result) -> Cause:
    names = _names(result, one.after)
    if one.after:
        return other_weights(one, other, names)
    text = "training does not start from the first recording's weights"
    hint = "load the same checkpoint in both, or draw weights by a seed that does not depend on the rank"
    return Cause(
        "other initial weights", text, in_words(names, one), hint=hint, details=(("parameters", tuple(names)),)
    )


def _samples(one: Numbers, other: Numbers, found: Comparison, result: Result) -> Cause:
    step = _first_step(result)
    mine, theirs = without_padding(one, other, step)
    often = min(theirs.values()) // max(min(mine.values()), 1)
    details = (("step", step),)
    if peers := [finding.ranks for finding in result.findings if finding.axis == "tp" and finding.step == step]:
        text = f"tp peers {' '.join(map(ranks_text, peers))} are fed different rows in step {step}"
        hint = "tp ranks compute parts of the same samples: give each tp group one share of the batch"
        return Cause("peers differ", text, hint=hint, details=(("axis", "tp"), ("ranks", peers[0]), *details))
    if again := _fed_again(other, step):
        return replace(again, details=(*again.details, *details))
    if {*theirs} < {*mine} and often > 1 and all(count == often * mine[row] for row, count in theirs.items()):
        different, as_often = (" different", " as often") if max(mine.values()) > 1 else ("", "")
        text = f"of {len(mine)}{different} rows of step {step}, {len(theirs)} are fed, each {often} times{as_often},"
        text += " and the others to no rank"
        hint = "give each data-parallel rank its own share of the first recording's batch"
        return Cause("same samples", text, hint=hint, details=details)
    if late := _of_another_step(one, other, step):
        return replace(late, details=(*late.details, *details))
    if theirs < mine and often == max(theirs.values()):
        lost, of_all = sum((mine - theirs).values()), sum(mine.values())
        text = f"{lost} of {of_all} rows of step {step} are fed to no rank in this step"
        return Cause("samples lost", text, details=details)
    if twice := _fed_to_several(one, other):
        text = f"ranks draw overlapping samples: {twice} rows of these steps are fed to several of them"
        return Cause("samples overlap", text, details=details)
    every = {row for rows in one.rows.values() for row in rows}
    text = f"samples of step {step} are others than the first recording's"
    hint = "set the sampler's seed and the batch per rank so that both train on the same global batch"
    hint = hint if step == found.steps[0] else f"both are fed the same ones up to step {step - 1}"
    kind = "samples dealt otherwise" if {*theirs} <= every else "samples of no step"
    return Cause(kind, text, hint=hint, details=details)


def _fed_again(other: Numbers, step: int) -> Cause | None:
    """A rank whose passes were all fed the same rows."""
    passes = other.passes.get(step, {})
    again = sorted(rank for rank, fed in passes.items() if len(fed) > 1 and len({tuple(sorted(of)) for of in fed}) == 1)
    if not again:
        return None
    text = f"all {len(passes[again[0]])} microbatches of step {step} are fed the same rows on ranks {ranks_text(again)}"
    return Cause("microbatches repeated", text, details=(("ranks", tuple(again)),))


def _of_another_step(one: Numbers, other: Numbers, step: int) -> Cause | None:
    """Ranks whose rows are all of one other step."""
    fed = {rank: {row for rows in passes for row in rows} for rank, passes in other.passes.get(step, {}).items()}
    odd = sorted(rank for rank, rows in fed.items() if not rows <= {*one.rows[step]})
    steps = [at for at, rows in one.rows.items() if odd and all(fed[rank] <= {*rows} for rank in odd)]
    if len(steps) != 1:
        return None
    text = f"step {step} receives the samples of step {steps[0]}"
    text += f" on ranks {ranks_text(odd)}" * (len(odd) < len(fed))
    return Cause("data position", text, details=(("of_step", steps[0]), ("ranks", tuple(odd))))


def _fed_to_several(one: Numbers, other: Numbers) -> int:
    """Return how many rows are fed to several ranks in these steps, where the first recording has each once. Ranks that are
    always fed alike are one."""
    by_rank: dict[int, set[int]] = {}
    for passes in other.passes.values():
        for rank, fed in passes.items():
            by_rank.setdefault(rank, set()).update(row for rows in fed for row in rows)
    ranks = Counter(row for rows in {frozenset(rows) for rows in by_rank.values()} for row in rows)
    once = max(sum((rows for rows in one.rows.values()), Counter[int]()).values(), default=0) == 1
    return sum(number > 1 for number in ranks.values()) if once else 0


def _recipe(one: Numbers, other: Numbers, found: Comparison, result: Result) -> Cause:
    finding = result.findings[0]
    if finding.name == "learning rate" and (again := schedule_again(one, other)):
        return again
    if finding.name == "betas":
        betas = (str(of).strip("()").split(", ") for of in (finding.expected, finding.observed))
        odd = [number for number, pair in enumerate(zip(*betas, strict=False), 1) if len({*pair}) > 1]
        return Cause(f"beta{odd[0]}" if len(odd) == 1 else KINDS["optimizer"], "", finding=finding)
    if finding.name == SCALE:
        return _other_scale(one, other, finding.step or 0)
    return Cause(KINDS[finding.name], "", finding=finding)


def _other_scale(one: Numbers, other: Numbers, step: int) -> Cause:
    wanted, seen = (of.scales.get(step, ()) for of in (one, other))
    text = f"the loss of step {step} is scaled by {_numbers(seen)}, the first recording's by {_numbers(wanted)}"
    kind = KINDS[SCALE] if one.after else "another recipe"
    hint = "ranks have scales of their own" if len(seen) > len(wanted) else ""
    return Cause(kind, text, hint=hint, details=(("step", step), ("scales", seen)))


def _numbers(scales: tuple[float, ...]) -> str:
    return " and ".join(map(number_text, scales)) or "nothing"
