"""A rank died, hung, raised, left early, or left incomplete evidence."""

from __future__ import annotations

from collections import defaultdict

from harness.diagnosis.words import Broken, rank_words, some
from harness.evidence.records import AT_WORK, Exit
from harness.judge.result import Diagnosis, one_cause
from harness.judge.trial import Trial

ENDED = {"raised": "raised", "killed": "hung", "ok": "left early", "lost": "was lost"}


def process_failed(trial: Trial, broken: Broken) -> Diagnosis | None:
    blamed = [exit for exit in trial.run.exits if exit.blamed]
    others = [exit for exit in trial.run.exits if exit.how != "ok" and not exit.blamed]
    if not blamed:
        return _nobody_to_blame(others) if others else None
    alike: dict[str, list[int]] = defaultdict(list)
    for exit in blamed:
        alike[_how_it_ended(exit)].append(exit.rank)
    texts = [f"{rank_words(ranks)} {how}" for how, ranks in alike.items()]
    lines = [
        (f"rank {exit.rank}", f"last collective {exit.last_collective}") for exit in blamed[:2] if exit.last_collective
    ]
    lines += [("" if i else "stack", line.strip()) for i, line in enumerate(blamed[0].stack.splitlines()[:4])]
    if others:
        lines.append(("not to blame", f"{rank_words([exit.rank for exit in others])} only waited"))
    return one_cause("; ".join(texts[:3]), tuple(lines))


def _how_it_ended(exit: Exit) -> str:
    ended = f"died by {exit.signal}" if exit.how == "signal" else ENDED.get(exit.how, exit.how)
    text = exit.error.removeprefix(ended).lstrip(",; ").rstrip(".")
    own, disagrees, other = text.partition("; issued ")
    if disagrees:  # says more than what came of it
        return f"issued {other}, then {ended}: {own}"
    return f"{ended}: {text}" if text else ended


def _nobody_to_blame(failed: list[Exit]) -> Diagnosis:
    first = failed[0]
    if AT_WORK in first.error:
        return one_cause(f"too slow: {rank_words([exit.rank for exit in failed])} {first.error}")
    cause = f"{rank_words([exit.rank for exit in failed])} did not finish, and nothing tells which of them is the cause"
    lines = [(f"rank {exit.rank}", _how_it_ended(exit).replace("hung", "killed")) for exit in failed[:4]]
    lines += [("" if i else "stack", line.strip()) for i, line in enumerate(first.stack.splitlines()[:4])]
    return one_cause(cause, tuple(lines))


def incomplete(trial: Trial, broken: Broken) -> Diagnosis | None:
    """All processes ended well, and still something that should have been recorded was not."""
    if "completed" not in broken:
        return None
    asked, ran = trial.plan.dims.world_size, trial.run.world_size
    if asked != ran:
        return one_cause(f"{ran} ranks were launched, requested {asked} ({_degrees(trial)})")
    strangers = [(rank, e) for rank, e in sorted(trial.ranks.items()) if (e.rank, e.world_size) != (rank, ran)]
    if strangers:
        ranks, first = [rank for rank, _ in strangers], strangers[0][1]
        met = "ranks did not find each other" if first.world_size < ran else "ranks do not know who they are"
        return one_cause(
            f"{met}: {rank_words(ranks)} ran as rank {first.rank} of {first.world_size}, requested {ran} ranks"
        )
    silent = [rank for rank in range(ran) if rank not in trial.ranks and rank not in trial.run.unreadable]
    if silent:
        return one_cause(f"{rank_words(silent)} left no evidence: its process ended with code 0 and wrote no file")
    leaving = [exit for exit in trial.run.exits if exit.left]
    if leaving:
        text = f"{rank_words([exit.rank for exit in leaving])} left a process behind: {'; '.join(leaving[0].left)}"
        return one_cause(text, (("ended", "by the harness, which looks for what ranks started and did not end"),))
    return _missing_steps(trial) or _missing_parameters(trial)


def _degrees(trial: Trial) -> str:
    return " x ".join(f"{axis} {getattr(trial.plan.dims, axis)}" for axis in trial.plan.groups)


def _missing_steps(trial: Trial) -> Diagnosis | None:
    wanted = list(trial.case.steps)
    seen = {rank: [step.step for step in evidence.steps] for rank, evidence in sorted(trial.ranks.items())}
    odd = [rank for rank, steps in seen.items() if steps != wanted]
    if not odd:
        return None
    steps = seen[odd[0]]
    text = f"trained steps {', '.join(map(str, steps))} only" if steps else "trained no step"
    asked = f"steps {wanted[0]} to {wanted[-1]}" if trial.saved else f"{len(wanted)} steps"
    return one_cause(f"{rank_words(odd)} {text}, requested {asked}")


def _missing_parameters(trial: Trial) -> Diagnosis | None:
    """Parameters, gradients or updates that a rank does not have, or that the model should not have."""
    for rank, evidence in sorted(trial.ranks.items()):
        wanted, held = set(trial.plan.slices[rank]), {tensor.fqn for tensor in evidence.parameters}
        if wanted - held:
            return one_cause(
                f"rank {rank} does not hold {some(sorted(wanted - held))}, requested {len(wanted)} parameters"
            )
        if held - wanted:
            return one_cause(f"rank {rank} holds {some(sorted(held - wanted))}, which the model does not have")
        for step in evidence.steps:
            for what, names in (("has no gradient of", set(step.gradients)), ("does not update", set(step.parameters))):
                if held - names:
                    cause = f"rank {rank} {what} {some(sorted(held - names))} in step {step.step}"
                    return one_cause(f"{cause}: frozen, unused or not in the optimizer")
    return None
