"""The same evidence under another assumption: another request, another plan, a counterfactual reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.judge.assumed import AssumedOptimizer
from harness.judge.recorded import without_slices
from harness.judge.trial import Trial
from harness.plan.make_plan import make_plan
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.record import ReferenceRun
from harness.spec.case import Case

if TYPE_CHECKING:
    from harness.reference.counterfactual import Otherwise


def another_case(trial: Trial, case: Case) -> Trial:
    """Assume that this had been requested: with its plan, and the same reference."""
    plan = make_plan(case, trial.traits)
    return replace(trial, case=case, plan=without_slices(plan) if lacks_slices(trial) else plan)


def lacks_slices(trial: Trial) -> bool:
    """Return whether the job declares only a layout, so that the plan has no slices."""
    return "declared" not in trial.run.provided and not any(trial.plan.slices.values())


def another_feature(trial: Trial, **features: Any) -> Trial:
    return another_case(trial, replace(trial.case, features=replace(trial.case.features, **features)))


def another_recipe(trial: Trial, training: TrainingConfig) -> Trial:
    """Assume that this recipe had been requested: the reference is trained by it."""
    words = {**trial.order_of_entries, **trial.assumption.reference}
    reference = retrain(trial.case.model, training, trial.reference, **words)
    return replace(another_case(trial, replace(trial.case, training=training)), reference=reference)


def another_reference(trial: Trial, **otherwise: Any) -> Trial:
    """Assume another training of the reference, in addition to what is assumed of it already. The words are those of
    reference.counterfactual."""
    known = trial.assumption.reference
    together = {**known} | {key: _after(known.get(key), key, new) for key, new in otherwise.items()}
    words = trial.order_of_entries | together
    reference = retrain(trial.case.model, trial.case.training, trial.reference, **words)
    return replace(trial, reference=reference).assuming(reference=together)


def _after(first: Any, key: str, second: Any) -> Any:
    """What is made of values is done one after the other; all else the second one says alone. What either does not give to
    the optimizer is not given."""
    if first is None or key not in ("batch", "gradients", "left", "altered", "given"):
        return second
    if key == "altered":
        return lambda module, step: (first(module, step), second(module, step))
    if key == "given":
        return lambda *of: _of_those(second(*of), first(*of))
    return lambda step, values: second(step, first(step, values))


def _of_those(given: Mapping[str, Any], those: Mapping[str, Any]) -> dict[str, Any]:
    return {fqn: value for fqn, value in given.items() if fqn in those}


def another_optimizer(trial: Trial, assumed: AssumedOptimizer, **otherwise: Any) -> Trial:
    """Assume that the optimizer of some ranks or parameters did something else, and train the reference so."""
    return another_reference(trial, **otherwise).assuming(assumed)


def apart(trial: Trial, copies: Mapping[int, int], otherwise: Sequence[dict[str, Any]], **told: Any) -> Trial:
    """Assume that ranks train separate copies of the model. copies: by rank, which copy it trains. What is assumed
    of each copy and of all is in the words of reference.counterfactual. A single copy is a reference like any other."""
    together = [{**trial.order_of_entries, **trial.assumption.reference, **one} for one in otherwise]
    runs = retrain_apart(trial.case.model, trial.case.training, trial.reference, together, **told)
    references = {rank: runs[copy] for rank, copy in copies.items()} if len(runs) > 1 else {}
    return replace(trial, reference=runs[0]).assuming(references=references, apart=True)


def retrain_apart(
    model: ModelConfig,
    training: TrainingConfig,
    reference: ReferenceRun,
    otherwise: Sequence[dict[str, Any]],
    **told: Any,
) -> tuple[ReferenceRun, ...]:
    from harness.reference import counterfactual

    chosen = [counterfactual.Otherwise(**one) for one in otherwise]
    return counterfactual.retrain_apart(model, training, reference, counterfactual.Apart(otherwise=chosen, **told))


def retrain(model: ModelConfig, training: TrainingConfig, reference: ReferenceRun, **otherwise: Any) -> ReferenceRun:
    """Imports torch, which judging does not need."""
    from harness.reference import counterfactual

    chosen: Otherwise = counterfactual.Otherwise(**otherwise)
    return counterfactual.retrain(model, training, reference, chosen)
