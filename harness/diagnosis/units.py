"""FSDP's units are others than requested, or other ones are freed after forward; and what evaluation left gathered.

Shows in no number: found from what wrappers claim, and judged by memory and by what is gathered again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from harness.checks import reshard
from harness.checks.placements import disagreements
from harness.diagnosis import declarable
from harness.diagnosis.assume import another_feature
from harness.diagnosis.differences import NUMBERS, consequences, first_wrong_step, wrong_pairs
from harness.diagnosis.hypothesis import NOT_TESTED, Broken, Fact, Hypothesis, stated, verdict_of
from harness.diagnosis.layout import wrong_parts
from harness.diagnosis.words import by_rank, finding_line, of_first, on_ranks, some, traffic_lines
from harness.judge.measured import claimed_units
from harness.judge.result import Cause, Result, Verdict
from harness.judge.traffic import amount
from harness.judge.trial import Trial
from harness.judge.units_seen import units_seen
from harness.plan.make_plan import make_plan
from harness.plan.units_text import modules_text


def other_units(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Another policy for the units requested; else the units and what is kept of them as the wrappers claim it."""
    lines = tuple(traffic_lines(trial)) if "traffic" in broken else ()
    if "reshard" in broken and not (trial.case.wrapper == "fsdp1" and _wrong_units(trial)):
        for policy in _other_policies(trial):
            if verdict_of(another_feature(trial, reshard_after_forward=policy), "reshard") is Verdict.PASS:
                cause = Cause("another policy after forward", f"{_kept_text(trial)}, {policy} is observed")
                yield Hypothesis(cause, partial(another_feature, reshard_after_forward=policy), 1, lines)
    claims = trial.case.wrapper == "fsdp2" and all(claimed_units(evidence) for evidence in trial.ranks.values())
    if {"reshard", "placements"} & set(broken) and claims:
        yield Hypothesis(Cause("other units", _units_text(trial)), _as_claimed, 2, lines)


def _other_policies(trial: Trial) -> Iterator[str | int]:
    """Where units are the trainer's choice the default is whatever it does, and explains nothing."""
    case, shards = trial.case, trial.case.shards
    policies: list[str | int] = (
        ["always", "never"] if trial.plan.observed is not None else ["default", "always", "never"]
    )
    if case.wrapper == "fsdp2":
        policies += [degree for degree in range(2, shards) if shards % degree == 0]
    yield from (policy for policy in policies if policy != case.features.reshard_after_forward)


def _as_claimed(trial: Trial) -> Trial:
    """What a unit keeps is the claim's as well, not the policy's."""
    case = replace(trial.case, features=replace(trial.case.features, reshard_after_forward="default"))
    observed = {rank: claimed_units(evidence) for rank, evidence in trial.ranks.items()}
    return replace(trial, plan=make_plan(case, trial.traits.with_units(observed)))


def _units_text(trial: Trial) -> str:
    """How the units claimed by the first rank that has others differ from those requested; else what is kept of them."""
    wrapper = trial.case.wrapper
    wrong = _wrong_units(trial)
    if not wrong:
        return _with_the_root(trial) or _kept_text(trial)
    if left_out := _in_no_unit(trial, wrong[0]):
        which = f"{len(left_out)} of {len(trial.plan.shapes)} parameters ({some(left_out)})"
        ranks = on_ranks(trial, [rank for rank in wrong if _in_no_unit(trial, rank) == left_out])
        return f"{wrapper} leaves out {which}{ranks}: no unit shards them or reduces their gradients"
    requested = [frozenset(unit) for unit in trial.plan.units[wrong[0]]]
    seen = units_seen(trial, wrong[0])
    ranks = on_ranks(trial, [rank for rank in wrong if units_seen(trial, rank) == seen])
    counts = f"parameters are gathered in {len(seen)} piece{'s' * (len(seen) > 1)}, requested {len(requested)}{ranks}"
    if len(seen) == 1 < len(requested):
        return f"the whole model is one {wrapper} unit{ranks}: {counts}"
    if all(any(unit <= whole for whole in requested) for unit in seen):
        return f"{wrapper} units are finer than requested: {counts}"
    odd = next((unit for unit in seen if unit not in requested), frozenset())
    together = modules_text(fqn for fqn in trial.plan.shapes if fqn in odd)
    return f"{wrapper} units differ from those requested: {together} are gathered together, {counts}"


def _wrong_units(trial: Trial) -> list[int]:
    """The ranks that claim others than planned."""
    return [
        rank for rank in sorted(trial.ranks) if units_seen(trial, rank) != set(map(frozenset, trial.plan.units[rank]))
    ]


def _in_no_unit(trial: Trial, rank: int) -> list[str]:
    """Parameters that no unit of FSDP1's has, though some units are claimed."""
    seen = frozenset[str]().union(*units_seen(trial, rank))
    planned = [fqn for fqn in trial.plan.shapes if any(fqn in unit for unit in trial.plan.units[rank])]
    return [fqn for fqn in planned if fqn not in seen] if seen and trial.case.wrapper == "fsdp1" else []


def _with_the_root(trial: Trial) -> str:
    """What the root gathers has no wrapper of its own, though it should be freed after forward. Where units are the trainer's
    choice only blocks need one."""
    wrappers = {rank: evidence.structure.get("") for rank, evidence in sorted(trial.ranks.items())}
    roots = {rank: wrapper.parameters if wrapper else () for rank, wrapper in wrappers.items()}
    freed = {fqn for of in trial.plan.after_forward.values() for fqn, kept in of.items() if kept.degree > 1}
    own = {fqn for fqn in freed if trial.plan.observed is None or fqn.startswith("layers.")}
    found = {rank: sorted({unit_of(fqn) for fqn in names if fqn in own}) for rank, names in roots.items()}
    texts = {rank: some(blocks, 3) for rank, blocks in found.items() if blocks}
    if not texts:
        return ""
    blocks, ranks, others = of_first(trial, texts)
    text = "are no units of their own, they are" if "," in blocks else "is no unit of its own, it is"
    return f"{blocks} {text} gathered with the root{ranks}{others}"


# ---- what is seen of memory


def kept_otherwise(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Of no policy and no claim: freed on paper only, or by some ranks."""
    if "reshard" in broken and (text := _kept_text(trial)):
        more = traffic_lines(trial)
        yield stated(broken, "reshard", "another policy after forward", text, "traffic", more=more)


def _kept_text(trial: Trial) -> str:
    """By what should be and what is, the blocks and other modules of which something else is kept than planned: of the pipeline
    stages together where all ranks of a stage have the same, else of each rank."""
    wrong = {rank: found for rank in sorted(trial.ranks) if (found := _kept_by(trial, rank))}
    every = {fqn: states for found in wrong.values() for fqn, states in found.items()}
    held = {rank: {fqn: every[fqn] for fqn in every if fqn in trial.plan.after_forward[rank]} for rank in wrong}
    texts = [by_rank(trial, dict.fromkeys(wrong, _states_text(every)))] * bool(wrong)
    if held != wrong:
        texts = [by_rank(trial, {rank: _states_text(found) for rank, found in wrong.items()})]
    asked, pipelined = trial.case.features.reshard_after_forward, trial.case.dims.pp > 1
    policy = (
        f"reshard_after_forward {asked} is requested{', which is never under pp' * (asked == 'default' and pipelined)}"
    )
    return f"after forward: {'; '.join(texts)}; {policy}" if texts else ""


def _states_text(found: Mapping[str, tuple[str, str]]) -> str:
    units: dict[tuple[str, str], list[str]] = {}
    for fqn, states in found.items():
        units.setdefault(states, []).append(unit_of(fqn))
    named = [(some([*dict.fromkeys(names)], 3), states) for states, names in units.items()]
    return "; ".join(f"{names} {state}, should be {wanted}" for names, (wanted, state) in named)


def unit_of(fqn: str) -> str:
    """layers.0 of layers.0.attention.wq.weight, norm of norm.weight."""
    return ".".join(fqn.split(".")[: 2 if fqn.startswith("layers.") else 1])


def _kept_by(trial: Trial, rank: int) -> dict[str, tuple[str, str]]:
    """In the first forward pass of each model part: what should be, and what is, of parameters cut as planned."""
    steps, cut = trial.ranks[rank].steps, {fqn for other, fqn, _ in wrong_parts(trial) if other == rank}
    wanted = {fqn: kept for fqn, kept in trial.plan.after_forward[rank].items() if fqn not in cut}
    found: dict[str, tuple[str, str]] = {}
    for record in steps[0].after_forward if steps else ():
        for fqn, held in record.bytes.items():
            if fqn in wanted and held != wanted[fqn].bytes and fqn not in found:
                seen = reshard.observed_value(trial, rank, fqn, held)
                words = f"{amount(seen)} of it" if isinstance(seen, int) else seen.replace("gathered", "still gathered")
                found[fqn] = (reshard.kept_text(trial, wanted[fqn].degree), words)
    return found


def units_disagree(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Where units are the trainer's choice, ranks that hold the same parameters must still agree on them. Elsewhere they are
    claimed otherwise than memory and bytes are."""
    if "placements" in broken and (apart := disagreements(trial)):
        cause = Cause("ranks disagree on units", f"ranks wrap different {trial.case.wrapper} units", finding=apart[0])
        yield Fact(cause, ("placements",), (finding_line(broken["placements"]),))
    elif "placements" in broken and any(
        units_seen(trial, r) - {*map(frozenset, trial.plan.units[r])} for r in trial.ranks
    ):
        yield stated(broken, "placements", "other units", _units_text(trial))


def other_flat_units(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """FSDP1 cuts a vector of all that a unit has, so that what ranks hold follows from the units."""
    if "placements" in broken and trial.case.wrapper == "fsdp1" and _wrong_units(trial):
        checks = ("shard_contents", "reshard", "traffic", "memory", *_of_what_is_left_out(trial, broken))
        yield stated(broken, "placements", "other units", _units_text(trial), *checks, more=NOT_TESTED)


def _of_what_is_left_out(trial: Trial, broken: Broken) -> tuple[str, ...]:
    """Checks of gradients, if no others are wrong at first than those of parameters that are in no unit."""
    step = first_wrong_step(trial) if "gradients" in broken else None
    wrong = [] if step is None else wrong_pairs(trial, step)
    of_no_unit = bool(wrong) and all(fqn in _in_no_unit(trial, rank) for rank, fqn in wrong)
    return consequences(trial, step) if step is not None and of_no_unit else ()


def left_by_evaluation(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """What a pass that trains nothing gathered and nobody freed: the next step does not gather it, or there it stays."""
    left = {rank: found for rank in sorted(trial.ranks) if (found := reshard.left_by_evaluation(trial, rank))}
    if "reshard" in broken and left:
        texts = {
            rank: f"{some(sorted({fqn for _, fqn, _ in found}), 3)} gathered {reshard.until(trial, found[0][0])}"
            for rank, found in left.items()
        }
        text = f"evaluation left {by_rank(trial, texts)}"
        text, more = f"{text}: no backward follows that would reshard them", traffic_lines(trial)
        yield stated(broken, "reshard", "left gathered by evaluation", text, "traffic", more=more)


def left_by_backward(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Units that no backward freed. The next forward pass does not gather them, and computes with what was there before the
    step; numbers that are wrong for it have no reference."""
    seen = {
        rank: (step.step, [*dict.fromkeys(map(unit_of, left))])
        for rank, evidence in sorted(trial.ranks.items())
        for step in reversed(evidence.steps)
        if (left := reshard.left_by_backward(trial, evidence, step.step))
    }
    first = min((step for step, _ in seen.values()), default=0)
    if "reshard" in broken and seen and not _kept_after_forward(broken["reshard"], first):
        texts = {
            rank: f"{some(units, 3)} still gathered after the backward of step {n}" for rank, (n, units) in seen.items()
        }
        kind, text = "left gathered by backward", by_rank(trial, texts)
        again = [finding_line(broken["traffic"])] if "traffic" in broken else []
        chosen = () if again else declarable.lines(declarable.gathered(trial))
        more = (*again, *(NOT_TESTED if NUMBERS & {*broken} else ()), *chosen)
        yield stated(broken, "reshard", kind, text, "traffic", "memory", more=more)


def _kept_after_forward(result: Result, step: int) -> bool:
    """Whether it was not freed after forward already, in that step or before: then backward is not what kept it."""
    return any(one.quantity.endswith(reshard.AFTER_FORWARD) and (one.step or 0) <= step for one in result.findings)
