"""Another wrapper than requested is at work, or other units are freed after forward than the policy frees.

Neither shows in any number: the one is found from what the wrappers claim to be, the other from memory and second gathering.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness.checks import reshard
from harness.checks.placements import disagreements
from harness.diagnosis.words import Broken, finding_line, on_ranks, some, traffic_lines
from harness.judge.result import Diagnosis, Verdict, one_cause
from harness.judge.traffic import still_gathered
from harness.judge.trial import Trial
from harness.judge.units_seen import units_seen
from harness.plan.make_plan import make_plan
from harness.spec.case import Case


def wrong_wrapper(trial: Trial, broken: Broken) -> Diagnosis | None:
    """By the wrappers' own word. Where a layout explains what ranks hold, that was named before."""
    asked = trial.case.wrapper
    kinds = {wrapper.kind for evidence in trial.ranks.values() for wrapper in evidence.structure.values()}
    if "features" not in broken or not kinds or kinds == {asked}:
        return None
    ran = " and ".join(sorted(kinds))
    cause = f"wrapper {asked or 'none'} is requested, {ran} is observed"
    return one_cause(cause, (finding_line("features", broken["features"]), *traffic_lines(trial)))


def left_by_evaluation(trial: Trial, broken: Broken) -> Diagnosis | None:
    """What a pass that trains nothing gathered and nobody freed: the next step does not gather it, or there it stays."""
    left = {rank: reshard.left_by_evaluation(trial, rank) for rank in sorted(trial.ranks)}
    if "reshard" not in broken or not any(left.values()):
        return _stale_after_evaluation(trial, broken)
    first = next(found for found in left.values() if found)
    names = sorted({fqn for _, fqn, _ in first})
    when = reshard.until(trial, first[0][0])
    ranks = on_ranks(trial, [rank for rank, found in left.items() if found])
    cause = f"evaluation left {some(names, 3)} gathered {when}{ranks}: nothing reshards what no backward follows"
    return one_cause(cause, (finding_line("reshard", broken["reshard"]), *traffic_lines(trial)))


def _stale_after_evaluation(trial: Trial, broken: Broken) -> Diagnosis | None:
    """What the policy keeps after forward is right, unless the weights change before it is used."""
    left = still_gathered(trial, min(trial.ranks))
    wrong = {finding.where for finding in broken["loss"].findings} if "loss" in broken else set()
    first = next((step for step, _, _ in left if f"step {step + 1}" in wrong), None)
    if first is None or f"step {first}" in wrong:
        return None
    names = sorted({fqn for step, fqn, _ in left if step == first})
    cause = f"the loss is wrong from step {first + 1} on, before which evaluation left {some(names, 3)} gathered"
    return one_cause(cause, (finding_line("loss", broken["loss"]), *traffic_lines(trial)))


def wrong_resharding(trial: Trial, broken: Broken) -> Diagnosis | None:
    if "reshard" not in broken:
        return None
    units = _wrong_units(trial)
    if not units:
        return None  # only what is gathered again differs, or memory that is no parameter's
    texts = [f"{some(names, 3)} {state}, should be {wanted}" for (wanted, state), names in units.items()]
    if _is_one_unit(trial):
        texts = [f"{texts[0]}: the whole model is one {trial.case.wrapper} unit, no block is one of its own"]
    policy = trial.case.features.reshard_after_forward
    other = next(
        (
            value
            for value in _other_policies(trial.case, left_open=trial.plan.observed is not None)
            if _fits(trial, value)
        ),
        None,
    )
    force = f"reshard_after_forward {policy} is requested" + (f", {other} is observed" if other else "")
    ranks = on_ranks(trial, [rank for rank in trial.ranks if _kept_otherwise(trial, rank)])
    lines = (finding_line("reshard", broken["reshard"]), *traffic_lines(trial))
    return one_cause(f"after forward: {'; '.join(texts)}{ranks}; {force}", lines)


def wrong_units(trial: Trial, broken: Broken) -> Diagnosis | None:
    """Other parameters are gathered together than the plan says: more collectives, or more memory at a time."""
    if "placements" in broken and (apart := disagreements(trial)):
        text = f"{apart[0].where.removesuffix(', FSDP units')} have {apart[0].observed}, {apart[0].expected}"
        line = finding_line("placements", broken["placements"])
        return one_cause(f"ranks wrap different {trial.case.wrapper} units: {text}", (line,))
    seen = {rank: units_seen(trial, rank) for rank in sorted(trial.ranks)}
    wanted = {rank: {frozenset(unit) for unit in trial.plan.units[rank]} for rank in seen}
    wrong = [rank for rank in seen if seen[rank] and seen[rank] != wanted[rank]]
    if "placements" not in broken or not wrong:
        return None
    units = seen[wrong[0]]
    finer = all(any(unit <= whole for whole in wanted[wrong[0]]) for unit in units)
    cause = f"{trial.case.wrapper} units are {'finer' if finer else 'others'} than requested"
    text = f"parameters are gathered in {len(units)} pieces, requested {len(wanted[wrong[0]])}"
    return one_cause(f"{cause}: {text}{on_ranks(trial, wrong)}", (finding_line("placements", broken["placements"]),))


def _is_one_unit(trial: Trial) -> bool:
    """By the wrappers' own word: then all of it is gathered for as long as any of it is needed."""
    return all(set(evidence.structure) == {""} for evidence in trial.ranks.values())


def _wrong_units(trial: Trial) -> dict[tuple[str, str], list[str]]:
    """By what should be and what is, the blocks and other modules whose parameters are kept otherwise than planned."""
    units: dict[tuple[str, str], list[str]] = {}
    for rank in sorted(trial.ranks):
        for fqn, states in _kept_otherwise(trial, rank).items():
            names = units.setdefault(states, [])
            if (unit := unit_of(fqn)) not in names:
                names.append(unit)
    return units


def unit_of(fqn: str) -> str:
    """layers.0 of layers.0.attention.wq.weight, norm of norm.weight."""
    return ".".join(fqn.split(".")[: 2 if fqn.startswith("layers.") else 1])


def _kept_otherwise(trial: Trial, rank: int) -> dict[str, tuple[str, str]]:
    """In the first forward pass of each model part: what should be, and what is."""
    steps, wanted = trial.ranks[rank].steps, trial.plan.after_forward[rank]
    found: dict[str, tuple[str, str]] = {}
    for record in steps[0].after_forward:
        for fqn, held in record.bytes.items():
            if fqn in wanted and held != wanted[fqn].bytes and fqn not in found:
                seen = reshard.observed_text(trial, rank, fqn, held)
                found[fqn] = (reshard.kept_text(trial, wanted[fqn].degree), seen.replace("gathered", "still gathered"))
    return found


def _other_policies(case: Case, *, left_open: bool = False) -> Iterator[str | int]:
    """Where units are the trainer's choice the default is whatever it does, and explains nothing."""
    policies: list[str | int] = ["always", "never"] if left_open else ["default", "always", "never"]
    if case.wrapper == "fsdp2":
        policies += [degree for degree in range(2, case.shards) if case.shards % degree == 0]
    yield from (policy for policy in policies if policy != case.features.reshard_after_forward)


def _fits(trial: Trial, policy: str | int) -> bool:
    other = replace(trial.case, features=replace(trial.case.features, reshard_after_forward=policy))
    plan = make_plan(other, trial.traits, trial.plan.observed, torch=trial.plan.torch)
    return reshard.check(replace(trial, case=other, plan=plan)).verdict is Verdict.PASS
