"""A rank died, hung, raised, left early, or left incomplete evidence."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from harness.checks.completed import why
from harness.diagnosis.assume import another_case, another_reference
from harness.diagnosis.contributions import adding
from harness.diagnosis.hypothesis import Broken, Fact, Hypothesis
from harness.diagnosis.words import MOST_TEXTS, Arrays, finding_line, in_order, rank_words, some
from harness.evidence.records import AT_WORK, Exit
from harness.evidence.text import ranks_text
from harness.judge.result import Cause, Line, Lines
from harness.judge.trial import Trial
from harness.plan.stages import parameters_of_stage
from harness.spec.dims import AXES

ENDED = {"raised": "raised", "killed": "hung", "ok": "left early", "lost": "was lost"}
FOLLOWING = ("completed", "initial_weights", "checkpoint", "features", "memory", "traffic", "schedule", "resume")
"""Checks of what a parameter or a step leaves, which breaks where there is none of it."""


def not_trained(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Parameters without a gradient, or out of the optimizer's reach: they stay, and without a gradient they are in no norm."""
    steps = [step for evidence in trial.ranks.values() for step in evidence.steps]
    held = {tensor.fqn for evidence in trial.ranks.values() for tensor in evidence.parameters}
    without = {fqn for fqn in held if not any(fqn in step.gradients for step in steps)}
    left = {fqn for fqn in held if not any(fqn in step.parameters for step in steps)} | without
    if "completed" not in broken or not steps or not left or held - set(trial.plan.shapes):
        return

    def assume(trial: Trial, gradients: Callable[[int, Arrays], Arrays]) -> Trial:
        as_they_were = {fqn: trial.reference.weights[fqn] for fqn in left}
        return another_reference(trial, gradients=gradients, left=lambda step, seen: seen | as_they_were)

    def none(step: int, seen: Arrays) -> Arrays:
        return seen | {fqn: np.zeros_like(seen[fqn]) for fqn in without}

    text = missing_parameters(trial)
    yield Hypothesis(Cause("incomplete", text), partial(assume, gradients=none))
    if not without:
        text += "; nothing sets their gradients to zero either, so no optimizer has them"
        added = adding([*trial.case.steps][1:], sorted(left), trial.case.training.max_norm)
        yield Hypothesis(Cause("incomplete", text), partial(assume, gradients=added))


def layers_lost(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """The last layers are on no rank: a shallower model trains without complaint."""
    held = {".".join(tensor.fqn.split(".")[:2]) for evidence in trial.ranks.values() for tensor in evidence.parameters}
    layers = [f"layers.{layer}" for layer in range(trial.case.model.n_layers)]
    gone = [layer for layer in layers if layer not in held]
    count = len(layers) - len(gone)
    if "completed" not in broken or not gone or not count or gone != layers[count:]:
        return

    def assume(trial: Trial) -> Trial:
        case, lost = replace(trial.case, model=replace(trial.case.model, n_layers=count)), tuple(f"{x}." for x in gone)
        weights = {fqn: value for fqn, value in trial.reference.weights.items() if not fqn.startswith(lost)}
        reference = replace(trial.reference, weights=weights)
        return another_reference(replace(another_case(trial, case), reference=reference))

    train = "1 layer trains" if count == 1 else f"{count} layers train"
    text = f"{some(gone)} {'is' if len(gone) == 1 else 'are'} on no rank: {train}"
    yield Hypothesis(Cause("layers lost", text, expected=str(len(layers))), assume)


def process_failed(trial: Trial, broken: Broken) -> Iterator[Fact]:
    blamed = [exit for exit in trial.run.exits if exit.blamed]
    others = [exit for exit in trial.run.exits if exit.how != "ok" and not exit.blamed]
    if not blamed:
        yield from _nobody_to_blame(others) if others else ()
        return
    alike: dict[str, list[int]] = defaultdict(list)
    for exit in blamed:
        alike[_how_it_ended(exit)].append(exit.rank)
    texts = [f"{rank_words(ranks)} {how}" for how, ranks in alike.items()]
    last = ((f"rank {exit.rank}", exit.last_collective) for exit in blamed[:2])
    reason = why(blamed[0].error)
    lines: list[Line] = [("why", reason)] * bool(reason)
    lines += [*((who, f"last collective {call}") for who, call in last if call), *_stack(blamed[0])]
    if others:
        lines.append(("not to blame", f"{rank_words([exit.rank for exit in others])} only waited"))
    yield Fact(Cause("a process failed", "; ".join(texts[:3])), ("completed",), tuple(lines))


def _how_it_ended(exit: Exit) -> str:
    ended = f"died by {exit.signal}" if exit.how == "signal" else ENDED.get(exit.how, exit.how)
    text = exit.error.removeprefix(ended).lstrip(",; ").rstrip(".")
    if exit.diverged:  # says more than what came of it
        return f"{exit.reason}, then {ended}: {text}"
    text = "; ".join(filter(None, [text, exit.reason]))
    return f"{ended}: {text}" if text else ended


def _stack(exit: Exit) -> Lines:
    return tuple(("" if i else "stack", line.strip()) for i, line in enumerate(exit.stack.splitlines()[:4]))


def _nobody_to_blame(failed: list[Exit]) -> Iterator[Fact]:
    first, ranks = failed[0], rank_words([exit.rank for exit in failed])
    if AT_WORK in first.error:
        yield Fact(Cause("too slow", f"too slow: {ranks} {first.error}"), ("completed",))
        return
    text = f"{ranks} did not finish, and nothing shows which of them is the cause"
    if first.undelivered:
        text = f"{ranks} did not finish: {first.undelivered}"
    lines = [(f"rank {exit.rank}", _how_it_ended(exit).replace("hung", "killed")) for exit in failed[:4]]
    yield Fact(Cause("a process failed", text), ("completed",), (*lines, *_stack(first)))


def incomplete(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """All processes ended well, and still something that should have been recorded was not."""
    everything = (_wrong_world, _strangers, _silent)
    for look in (*everything, _left_behind, _missing_steps, missing_parameters):
        if "completed" in broken and (text := look(trial)):
            line = finding_line(broken["completed"])
            yield Fact(Cause("incomplete", text), tuple(broken) if look in everything else FOLLOWING, (line,))
            return


def _wrong_world(trial: Trial) -> str:
    dims, ran = trial.plan.dims, trial.run.world_size
    degrees = " x ".join(f"{axis} {getattr(dims, axis)}" for axis in AXES if axis in trial.plan.groups)
    ranks = "1 rank was" if ran == 1 else f"{ran} ranks were"
    return f"{ranks} launched, requested {dims.world_size} ({degrees})" if ran != dims.world_size else ""


def _strangers(trial: Trial) -> str:
    ran = trial.run.world_size
    strangers = {rank: e for rank, e in sorted(trial.ranks.items()) if (e.rank, e.world_size) != (rank, ran)}
    if not strangers:
        return ""
    first = next(iter(strangers.values()))
    met = "ranks did not find each other" if first.world_size < ran else "ranks do not know who they are"
    return f"{met}: {rank_words([*strangers])} ran as rank {first.rank} of {first.world_size}, requested {ran} ranks"


def _silent(trial: Trial) -> str:
    there = {*trial.ranks, *trial.run.unreadable}
    silent = [rank for rank in range(trial.run.world_size) if rank not in there]
    return f"{rank_words(silent)} left no evidence: its process ended with code 0 and wrote no file" if silent else ""


def _left_behind(trial: Trial) -> str:
    left = {exit.rank: exit.left for exit in trial.run.exits if exit.left}
    first = "; ".join(next(iter(left.values()), ()))
    return f"{rank_words([*left])} left a process behind: {first}, which the harness ended" if left else ""


def _missing_steps(trial: Trial) -> str:
    wanted = list(trial.case.steps)
    seen = {rank: [step.step for step in evidence.steps] for rank, evidence in sorted(trial.ranks.items())}
    if not (odd := [rank for rank, steps in seen.items() if steps != wanted]):
        return ""
    steps = seen[odd[0]]
    text = f"took {len(steps)} optimizer step{'s' * (len(steps) > 1)}" if steps else "trained no step"
    requested = f"steps {wanted[0]} to {wanted[-1]}" if trial.saved else f"{len(wanted)} steps"
    return f"{rank_words(odd)} {text}, requested {requested}"


def missing_parameters(trial: Trial) -> str:
    """Parameters, gradients or updates that a rank does not have, or that the model should not have."""
    if text := _cut_elsewhere(trial):
        return text
    for rank in sorted(trial.ranks):
        wanted, held = set(trial.plan.slices[rank]), _held(trial, rank)
        if wanted - held:
            where = _holders(trial, wanted - held)
            return f"rank {rank} does not hold {some(sorted(wanted - held))}{where}, requested {len(wanted)} parameters"
        if beside := held - wanted:
            ranks = [r for r in trial.ranks if beside <= _held(trial, r) - set(trial.plan.slices[r])]
            holds = f"{rank_words(sorted(ranks))} hold{'s' * (len(ranks) == 1)}"
            return f"{holds} {some(sorted(beside))}, {_owners(trial, beside)}"
    return _untrained(trial)


def _held(trial: Trial, rank: int) -> set[str]:
    return {tensor.fqn for tensor in trial.ranks[rank].parameters}


def _cut_elsewhere(trial: Trial) -> str:
    """A pipeline each of whose layers is somewhere, and some on other ranks than planned."""
    ranks = [rank for rank in trial.plan.groups.get("pp", [()])[0] if rank in trial.ranks]
    held = {rank: _layers(_held(trial, rank)) for rank in ranks}
    wanted = {rank: _layers(trial.plan.slices[rank]) for rank in ranks}
    odd = [rank for rank in ranks if held[rank] != wanted[rank]]
    if not odd or sorted(itertools.chain(*held.values())) != [*range(trial.case.model.n_layers)]:
        return ""
    texts = [f"rank {r} has layers {_layers_text(held[r])}, requested {_layers_text(wanted[r])}" for r in odd[:4]]
    return f"stages are cut at other layers: {'; '.join(texts)}"


def _layers(fqns: Iterable[str]) -> list[int]:
    return sorted({int(fqn.split(".")[1]) for fqn in fqns if fqn.startswith("layers.")})


def _layers_text(layers: list[int]) -> str:
    return ranks_text(layers)[1:-1] or "none"


def _untrained(trial: Trial) -> str:
    """In the first step in which some rank lacks a gradient or an update: the parameters of each rank that does."""
    for step in trial.case.steps:
        for what in ("gradients", "parameters"):
            taken = [(rank, getattr(record, what)) for rank, record, _ in trial.steps() if record.step == step]
            if missing := {rank: gone for rank, there in taken if (gone := _held(trial, rank) - {*there})}:
                alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
                for rank, gone in missing.items():
                    alike[tuple(in_order(trial, gone))].append(rank)
                return _each_without(trial, alike, what, step)
    return ""


def _each_without(trial: Trial, alike: Mapping[tuple[str, ...], list[int]], what: str, step: int) -> str:
    """alike: by the parameters that they lack, the ranks. One text says all where ranks lack what they hold of one list."""
    everyone = sorted(itertools.chain(*alike.values()))
    every = in_order(trial, itertools.chain(*alike))
    if all(set(gone) == _held(trial, rank) & set(every) for gone, ranks in alike.items() for rank in ranks):
        return _without(trial, everyone, what, every, step)
    texts = [_without(trial, ranks, what, [*gone], step) for gone, ranks in alike.items()]
    more = f"; {len(texts) - MOST_TEXTS} other sets of ranks lack others" * (len(texts) > MOST_TEXTS)
    return "; ".join(texts[:MOST_TEXTS]) + more


def _without(trial: Trial, ranks: list[int], what: str, fqns: list[str], step: int) -> str:
    one, every = len(ranks) == 1, range(trial.case.n_stages) if trial.case.dims.pp > 1 else ()
    lacks = (
        f"{'has' if one else 'have'} no gradient of" if what == "gradients" else f"{'does' if one else 'do'} not update"
    )
    stages = [stage for stage in every if set(parameters_of_stage(trial.case, stage)) <= set(fqns)]
    whole = f" (all of stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))})" if stages else ""
    why = (
        "none was in place as the optimizer stepped"
        if what == "gradients"
        else "frozen, unused, or in no optimizer that steps"
    )
    return f"{rank_words(ranks)} {lacks} {some(fqns)}{whole} in step {step}: {why}"


def _holders(trial: Trial, fqns: set[str]) -> str:
    """Of a pipeline: who has them in its place."""
    there = [rank for rank in trial.ranks if fqns <= _held(trial, rank)]
    return f", which {rank_words(there)} hold{'s' * (len(there) == 1)}" if there and trial.case.dims.pp > 1 else ""


def _owners(trial: Trial, fqns: set[str]) -> str:
    owners = [rank for rank, slices in sorted(trial.plan.slices.items()) if fqns <= set(slices)]
    return (
        f"which belong{'s' * (len(fqns) == 1)} to {rank_words(owners)}" if owners else "which the model does not have"
    )
