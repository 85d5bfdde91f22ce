"""Diagnosis: failing checks -> causes that are proven, in the field's words, and the evidence for them in a few lines.

Each file has one subject. It proposes hypotheses, which the engine tests: under the assumption the stored evidence is
judged again. A hypothesis is proven if the failing checks pass then, and no passing check fails. A file also states
facts, which a check saw directly. What neither explains is located: the place is given where numbers are first wrong.

A diagnosis is a service; the checks alone decide the verdict. So what raises is skipped, and the evidence says so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from harness.core import rings
from harness.core.causes.contributions import lacks_the_outputs_part, sums_of_whole_gradients
from harness.core.causes.declarable import IF_INTENDED, adapter_lines, allow_moved_inside_lines, merge_declarations
from harness.core.causes.engine import explain
from harness.core.causes.facts import (
    adapters_scaled,
    facts_of_other_stages,
    facts_of_table,
    layers_lost,
    not_finite,
    not_frozen,
    not_trained,
    process_failed,
)
from harness.core.causes.hypothesis import Facts, Suspects
from harness.core.causes.reported import facts_of_wrong_reports, wrong_reports
from harness.core.causes.request import neighbours
from harness.core.causes.structure_facts import facts_of_structure, fsdp2_switches
from harness.core.causes.telling import HARMLESS_CHECKS, build_diagnosis, other_launch_lines, weaker_test_lines
from harness.core.checks import judge
from harness.core.judge.result import Diagnosis, Result, Verdict, diagnosis_of_one_cause
from harness.core.judge.trial import Trial, launch_label

ORDER = (
    "layers_lost",
    "not_trained",
    "not_frozen",
    "adapters_scaled",
    "neighbours",
    "resumed_otherwise",
    "copies_not_loaded",
    "changed_weights",
    "wrong_recipe",
    "wrong_reports",
    "wrong_numbers",
    "wrong_exports",
    "other_weights",
    "other_samples",
    "other_positions",
    "sums_of_whole_gradients",
    "lacks_the_outputs_part",
    "lacks_dropout",
    "other_masks",
    "copies_trained_apart",
    "multiples_passed_back",
)
"""Functions that propose causes, of the core and of rings, as they are asked. A test demands that all are named here."""
ORDER_OF_FACTS = (
    "resumed_otherwise",
    "process_failed",
    "facts_of_other_stages",
    "not_finite",
    "other_weights",
    "other_samples",
    "other_positions",
    "changed_weights",
    "facts_of_structure",
    "rounded_to_float32",
    "coarsely_rounded_numbers",
    "random_state_not_restored",
    "wrong_backward",
    "facts_of_wrong_reports",
    "odd_numbers",
    "odd_exports",
    "facts_of_table",
)
"""The same of functions that say what a check saw directly."""
SUSPECTS_OF_CORE: tuple[Suspects, ...] = (
    layers_lost,
    not_trained,
    not_frozen,
    adapters_scaled,
    neighbours,
    wrong_reports,
    sums_of_whole_gradients,
    lacks_the_outputs_part,
)
FACTS_OF_CORE: tuple[Facts, ...] = (
    process_failed,
    facts_of_other_stages,
    not_finite,
    facts_of_structure,
    facts_of_wrong_reports,
    facts_of_table,
)


@functools.cache
def all_suspects() -> tuple[Suspects, ...]:
    """Return the functions of core and rings that propose hypotheses, in the order in which they are asked."""
    return sort_functions([*SUSPECTS_OF_CORE, *rings.functions_of("suspects")], ORDER)


@functools.cache
def costly_suspects() -> tuple[Suspects, ...]:
    """Return the suspects that compute models to propose something. All of them are of rings."""
    return tuple(rings.functions_of("costly"))


@functools.cache
def all_facts() -> tuple[Facts, ...]:
    """Return the functions of core and rings that state facts, in the order in which they are asked."""
    return sort_functions([*FACTS_OF_CORE, *rings.functions_of("facts")], ORDER_OF_FACTS)


def sort_functions(functions: Sequence[Any], names: Sequence[str]) -> tuple[Any, ...]:
    """Return the functions in the order of these names. Functions with another name come last, in their order."""
    order = {name: index for index, name in enumerate(names)}
    return tuple(sorted(functions, key=lambda function: order.get(function.__name__, len(names))))


def diagnose(
    trial: Trial,
    results: Sequence[Result],
    suspects: Sequence[Suspects] | None = None,
    facts: Sequence[Facts] | None = None,
    costly: Sequence[Suspects] | None = None,
) -> Diagnosis | None:
    """Return the causes of the failing checks and the evidence for them. None if no check fails. Never raises.

    If a case resumes, the first launch that fails a check is diagnosed. A launch that only keeps or moves too much is
    passed over where more than that fails later, because it does not explain it. suspects, facts, costly: by default
    all of core and rings.
    """
    suspects = all_suspects() if suspects is None else suspects
    facts = all_facts() if facts is None else facts
    costly = costly_suspects() if costly is None else costly
    failed = [result for result in results if result.verdict is Verdict.FAIL]
    earlier_results = judge(trial.saved[-1]) if failed and trial.saved else []
    if earlier_results:
        earlier_diagnosis = diagnose(trial.saved[-1], earlier_results, suspects, facts, costly)
        if earlier_diagnosis:
            failed_earlier = {result.check for result in earlier_results if result.verdict is Verdict.FAIL}
            failed_later = {result.check for result in failed}
            harmless = failed_earlier <= HARMLESS_CHECKS
            if not (harmless and failed_later - HARMLESS_CHECKS):
                later_lines = other_launch_lines(trial, failed, earlier_results)
                return dataclasses.replace(earlier_diagnosis, evidence=(*earlier_diagnosis.evidence, *later_lines))
    broken = {result.check: result for result in failed if result.findings}
    if not broken:
        return diagnosis_of_one_cause(f"{failed[0].check} is broken and does not say where") if failed else None
    diagnosis = build_diagnosis(trial, results, explain(trial, results, suspects, facts, costly))
    if trial.case.last_step is not None:
        diagnosis = dataclasses.replace(diagnosis, launch=launch_label(trial))
    other_lines = other_launch_lines(trial.saved[-1], earlier_results, failed) if earlier_results else ()
    other_lines += adapter_lines(trial, broken) + fsdp2_switches(trial)
    if not any(label == IF_INTENDED for label, _ in diagnosis.evidence):
        other_lines += allow_moved_inside_lines(trial, broken)
    lines = (*diagnosis.evidence, *other_lines, *weaker_test_lines(results))
    return dataclasses.replace(diagnosis, evidence=merge_declarations(trial.case, lines))


__all__ = ["Diagnosis", "all_facts", "all_suspects", "costly_suspects", "diagnose"]
