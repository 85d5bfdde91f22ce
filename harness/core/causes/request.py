"""Neighbours of the request: another layout, or other values of one field or two, that explain what checks of structure see.

The space is spanned by the fields of Features, TrainingConfig and TrainerTraits themselves, and by the layouts of the same
ranks. A neighbour is put to the test where a failing check passes under it on the rank that the check found first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from harness.core.case.case import Case
from harness.core.case.features import FEATURE_CHOICES, THREE_WAY_SWITCHES
from harness.core.case.traits import CHOICES as TRAIT_CHOICES
from harness.core.case.traits import OBSERVED, TrainerTraits
from harness.core.case.validation import validate
from harness.core.causes import declarable
from harness.core.causes.assume import assume_case, assume_recipe
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.layouts import other_layouts
from harness.core.causes.words import extent_text, finding_line, first_finding, traffic_lines
from harness.core.checks import all_checks, run_check
from harness.core.judge.finding import Finding
from harness.core.judge.measured import with_measured_traits
from harness.core.judge.order import flatten_trial
from harness.core.judge.result import Cause, Lines, Result, Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.reference.config import CHOICES as RECIPE_CHOICES
from harness.reference.config import unused_fields

KIND_OF_FIELD = {
    "reshard_after_forward": "another policy after forward",
    "fsdp_units": "other units",
    "compile": "odd traces",
    **dict.fromkeys(("features", "training"), "another feature"),
    "traits": "another trait",
}
"""Field -> its kind; all other fields have that of their part of the request."""
SOLVED_ELSEWHERE = (
    *("steps", "seed", "global_batch", "seq_len", "warmup_steps", "optimizer", "decay", "nesterov", "adjust_lr"),
    *("variable_length", "document_mask", "masked_samples", "all_valid", "last_batch"),
)
"""Fields of the recipe that are of the optimizer or of the data, which have solvers of their own."""
CLAIM_CHECKS = ("collective_order", "initial_weights", "process_groups", "settings")
"""Checks of structure that no request makes pass."""
CHOICES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "features": {**FEATURE_CHOICES, **THREE_WAY_SWITCHES},
    "training": RECIPE_CHOICES,
    "traits": TRAIT_CHOICES,
}
NO_RESULT = Result("", Verdict.PASS)
MOST_PAIRS = 300  # pairs of values that are looked at for one check

Values = Mapping[tuple[str, str], Any]
"""(part of the request: features, training, traits; field) -> value."""


@dataclass(frozen=True)
class Neighbour:
    """A request that differs from the case's in one field or two."""

    values: Values
    """The other values."""
    requested: Values
    """The requested ones."""

    def assume(self, trial: Trial) -> Trial:
        """Return the trial as if this had been requested. If the recipe differs, its reference is trained again.

        Imports torch then. Where no noise was measured for it, that of the requested recipe is taken for its bounds.
        """
        assumed = self.with_plan(trial)
        if not trial.reference.steps:
            return assumed
        if any(part == "training" for part, _ in self.values):
            assumed = replace(assumed, reference=assume_recipe(trial, assumed.case.training).reference)
        return replace(assumed, reference=replace(assumed.reference, noise=_noise_of(trial, assumed)))

    def with_plan(self, trial: Trial) -> Trial:
        """Return the trial with the plan of that request, which is all that checks of structure need.

        Units are measured anew if they become the trainer's choice. The reference stays as it was.
        """
        case = self.assumed_case(trial.case)
        traits = self.assumed_traits(trial.traits)
        if {("features", "fsdp_units"), ("features", "wrapper"), ("traits", "fsdp_units")} & self.values.keys():
            observed = with_measured_traits(case, traits, trial.run).measured
            known = replace(traits.measured, units=observed.units, flat_order=observed.flat_order)
            traits = replace(traits, measured=known)
        assumed = assume_case(replace(trial, plan=replace(trial.plan, traits=traits)), case)
        return assumed if trial.plan.flat else flatten_trial(assumed)

    def assumed_case(self, case: Case) -> Case:
        """Return the case with these values. Raises ValueError if there is no such valid case."""
        features = replace(case.features, **self._values_of("features"))
        training = replace(case.training, **self._values_of("training"))
        other = replace(case, features=features, training=training)
        if other.features.reshard_after_forward == case.features.reshard_after_forward != "default":
            other_units = self.values.get(("features", "fsdp_units")) == OBSERVED
            default = replace(features, reshard_after_forward="default")  # what units keep is claimed as well
            other = replace(other, features=default) if other_units else other
        validate(other, None, "")
        return other

    def assumed_traits(self, traits: TrainerTraits) -> TrainerTraits:
        """Return the traits with these values. Raises ValueError if there are no such traits."""
        return replace(traits, **self._values_of("traits"))

    def _values_of(self, part: str) -> dict[str, Any]:
        """Return the values of one part of the request (features, training, traits), by field."""
        return {name: value for (part_of_value, name), value in self.values.items() if part_of_value == part}

    def make_hypothesis(self, trial: Trial, broken: Broken, passing: Sequence[str], lines: Lines) -> Hypothesis:
        """Return the hypothesis that this was done. passing: the failing checks that pass under it on one rank."""
        (part, name), *_ = self.values
        is_trait = part == "traits"
        kind = KIND_OF_FIELD.get(name, KIND_OF_FIELD[part])
        texts = [f"{name} {_value_text(value)}" for (_, name), value in self.values.items()]
        expected = " and ".join(_value_text(value) for value in self.requested.values())
        observed = f"{' and '.join(texts)} is observed"
        if is_trait:
            observed = f"the trainer does as with trait {' and '.join(texts)}"
        details = tuple((name, value) for (_, name), value in self.values.items())
        cause = Cause(kind, observed, expected=expected, details=details)
        if name == "fsdp_units":  # how the units differ the check has seen
            findings = broken[passing[0]].findings
            cause = Cause(kind, "", hint=extent_text(trial, findings), finding=first_finding(findings), details=details)
        check_lines = [finding_line(broken[check]) for check in passing if check != "traffic"]
        declaring: Lines = ()
        if part == "features":
            declaring = declarable.feature_declaration_lines(self.assumed_case(trial.case))
        if is_trait:
            declaring = declarable.declaration_lines(trial.case, self._values_of("traits").items())
        claimed = OBSERVED in self.values.values()  # which is fitted to what is seen
        fitted = len(self.values) + is_trait + claimed
        return Hypothesis(cause, self.assume, fitted, (*check_lines, *lines, *declaring))


def _value_text(value: Any) -> str:
    """Return a value as it is written in the request; "none" for None."""
    return "none" if value is None else str(value)


def _noise_of(trial: Trial, assumed: Trial) -> Any:
    """Return the noise of the reference or golden, by key, completed for the assumed case.

    If none was measured for that, it has the requested case's. Empty if there is none at all.
    """
    noise = trial.reference.noise or (trial.golden.noise if trial.golden else {})
    noise_of_case = noise.get(trial.traits.noise_key(trial.case))
    return noise if noise_of_case is None else {trial.traits.noise_key(assumed.case): noise_of_case, **noise}


# ---- the space


def neighbours_of_one_field(trial: Trial) -> Iterator[Neighbour]:
    """Yield a neighbour for each other value of a field of features, recipe or traits. Invalid ones are left out."""
    case = trial.case
    for part, owner in (("features", case.features), ("training", case.training), ("traits", trial.traits)):
        requested = {field.name: getattr(owner, field.name) for field in fields(owner)} | _resolved_defaults(
            trial, part
        )
        for name, value in requested.items():
            for other in _possible_values(trial, part, name, value):
                neighbour = Neighbour({(part, name): other}, {(part, name): value})
                if other != value and _is_valid(neighbour, trial):
                    yield neighbour


def _resolved_defaults(trial: Trial, part: str) -> dict[str, Any]:
    """Return, by field of a part of the request, the value that None stands for. Empty for traits."""
    case = trial.case
    computes_in = case.training.compute_dtype or case.training.dtype
    values: dict[str, dict[str, Any]] = {
        "features": {
            "wrapper": case.wrapper,
            "reduce_dtype": case.features.reduce_dtype or computes_in,
            "fsdp_units": trial.traits.unit_policy(case),
            "microbatches": case.microbatches,
            "stages_per_rank": case.stages_per_rank,
        },
        "training": {"compute_dtype": computes_in},
    }
    return values.get(part, {})


def _possible_values(trial: Trial, part: str, name: str, value: Any) -> Iterable[Any]:
    """Return all values of a field: those that its part of the request names, both of a switch, or small integers.

    Empty for fields of the optimizer and the data, which have solvers of their own, and for those without known values.
    """
    is_the_optimizers = part == "training" and name in {*SOLVED_ELSEWHERE, *unused_fields(trial.case.training)}
    is_a_feature_too = (part, name) == ("traits", "fsdp_units")
    if is_the_optimizers or is_a_feature_too:
        return ()
    if name == "reshard_after_forward":
        degrees = [n for n in range(2, trial.case.shards) if trial.case.shards % n == 0]
        usual = ("always", "never", "default")[: 2 if trial.plan.measured_units is not None else 3]
        return (*usual, *degrees)  # where units are the trainer's choice the default is whatever it does
    named = CHOICES[part].get(name)
    if named is not None:
        default = part == "traits" or name in _resolved_defaults(trial, part)  # None is no separate value
        return (choice for choice in named if choice is not None or not default)
    if isinstance(value, bool):
        return (True, False)
    return range(trial.case.training.global_batch + 1) if isinstance(value, int) else ()


def _is_valid(neighbour: Neighbour, trial: Trial) -> bool:
    """Return whether the neighbour's case and traits exist."""
    try:
        neighbour.assumed_case(trial.case)
        neighbour.assumed_traits(trial.traits)
    except ValueError:
        return False
    return True


# ---- what is put to the test


def neighbours(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield the hypotheses of layouts and of other requests under which a failing check of structure passes.

    Requests are tried if no layout fits: with one other field, and with two if no single field makes a check pass. ZeRO
    that ran as DDP comes last. If only a layout is requested, only layouts are tried.
    """
    hypotheses = list(other_layouts(trial, broken))
    yield from hypotheses
    if not trial.case.is_complete:
        return
    if any(hypothesis.cause.kind == "another layout" for hypothesis in hypotheses):
        return
    looks = {name: _FailingCheck.of_result(trial, result) for name, result in broken.items() if _is_structure(name)}
    placements = broken.get("placements", NO_RESULT).findings
    if trial.case.wrapper == "fsdp1" and any(finding.kind == "unit" for finding in placements):
        looks = {}  # of its vectors all else follows
    telling: dict[str, list[Neighbour]] = {name: [] for name in looks}
    lines = tuple(traffic_lines(trial)) if "traffic" in broken else ()
    explained = set[str]()
    if looks:
        for neighbour in neighbours_of_one_field(trial):
            results = {name: look.result_under(neighbour) for name, look in looks.items()}
            passing = [name for name, result in results.items() if result.verdict is Verdict.PASS]
            finding_else = [name for name, result in results.items() if looks[name].has_other_findings(result)]
            if passing and not finding_else:
                explained |= {*passing}
                yield neighbour.make_hypothesis(trial, broken, passing, lines)
            for name in finding_else:
                telling[name].append(neighbour)
    if not explained:
        for name, candidates in telling.items():
            for pair in itertools.islice(_neighbours_of_two_fields(candidates, trial), MOST_PAIRS):
                if looks[name].result_under(pair).verdict is Verdict.PASS:
                    yield pair.make_hypothesis(trial, broken, [name], lines)
    yield from _zero_as_replicas(trial, broken)


def _is_structure(name: str) -> bool:
    """Return whether another request may make this check pass: it judges structure, or samples."""
    return name == "samples" or (all_checks()[name].STAGE == "structure" and name not in CLAIM_CHECKS)


def _neighbours_of_two_fields(candidates: Iterable[Neighbour], trial: Trial) -> Iterator[Neighbour]:
    """Yield each valid neighbour that combines two of the candidates with different fields."""
    for first, second in itertools.combinations(candidates, 2):
        if first.values.keys().isdisjoint(second.values):
            pair = Neighbour({**first.values, **second.values}, {**first.requested, **second.requested})
            if _is_valid(pair, trial):
                yield pair


@dataclass(frozen=True)
class _FailingCheck:
    """A failing check with the trial reduced to the rank of its first finding, where it is judged first."""

    name: str
    trial: Trial
    trial_of_rank: Trial
    findings: frozenset[Finding]

    @classmethod
    def of_result(cls, trial: Trial, result: Result) -> _FailingCheck:
        """Return the failing check of this result. `samples` needs all ranks, so its trial is not reduced."""
        ranks = (*(rank for rank in result.findings[0].ranks if rank in trial.ranks), min(trial.ranks))
        run = replace(trial.run, ranks={ranks[0]: trial.ranks[ranks[0]]}, chosen=ranks[:1])
        alone = trial if result.check == "samples" else replace(trial, run=run)
        return cls(
            result.check, trial, alone, frozenset((*result.findings, *_result_of_check(result.check, alone).findings))
        )

    def result_under(self, neighbour: Neighbour) -> Result:
        """Return the check's result under another request: on one rank, and if it passes there, on all ranks."""
        result = _result_of_check(self.name, neighbour.with_plan(self.trial_of_rank))
        return (
            _result_of_check(self.name, neighbour.with_plan(self.trial)) if result.verdict is Verdict.PASS else result
        )

    def has_other_findings(self, result: Result) -> bool:
        """Return whether the result has a finding that there was not before."""
        return not self.findings >= {*result.findings}


def _result_of_check(name: str, trial: Trial) -> Result:
    """Return the result of one check on this trial."""
    return run_check(name, all_checks()[name].check, trial)


# ---- ZeRO


def _zero_as_replicas(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield the hypothesis that ZeRO-1 or 2 ran as ZeRO-0, which is DDP.

    Nothing unless `memory` fails under such a wrapper. Then whole gradients are reduced, and every rank's optimizer has
    all of them.
    """
    if trial.case.wrapper in ("zero1", "zero2") and "memory" in broken:
        cause = Cause("another stage of ZeRO", "wrapper zero0 is observed", expected=trial.case.wrapper)
        yield Hypothesis(cause, _with_replicas, 1, (finding_line(broken["memory"]),))


def _with_replicas(trial: Trial) -> Trial:
    """Return the trial with the traffic of DDP and ZeRO's flattened parameters, of which each rank has all."""
    dims = replace(trial.case.dims, dp_shard=1, dp_replicate=trial.case.dims.dp_shard)
    case = replace(trial.case, dims=dims, features=replace(trial.case.features, wrapper="ddp"))
    ddp_plan = make_plan(case, trial.traits)
    empty_zero_fields: dict[str, Any] = dict.fromkeys(
        ("gradient_slices", "state_slices", "gradient_bytes", "state_bytes"), {}
    )
    plan = replace(
        trial.plan,
        dims=dims,
        groups=ddp_plan.groups,
        flows=ddp_plan.flows,
        even_flows=ddp_plan.even_flows,
        last_flows=ddp_plan.last_flows,
        **empty_zero_fields,
    )
    return replace(trial, case=case, plan=plan)
