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
from harness.core.case.features import FEATURE_CHOICES, OR_SWITCHED
from harness.core.case.traits import CHOICES as TRAIT_CHOICES
from harness.core.case.traits import OBSERVED, TrainerTraits
from harness.core.case.validation import validate
from harness.core.causes import declarable
from harness.core.causes.assume import another_case, another_recipe
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.layouts import other_layouts
from harness.core.causes.words import extent, finding_line, first_finding, traffic_lines
from harness.core.checks import all_checks, run_check
from harness.core.judge.finding import Finding
from harness.core.judge.measured import measured
from harness.core.judge.order import flattened
from harness.core.judge.result import Cause, Lines, Result, Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.reference.config import CHOICES as RECIPE_CHOICES
from harness.reference.config import unused

KINDS = {
    "reshard_after_forward": "another policy after forward",
    "fsdp_units": "other units",
    "compile": "odd traces",
    **dict.fromkeys(("features", "training"), "another feature"),
    "traits": "another trait",
}
"""Field -> its kind; all other fields have that of their part of the request."""
OTHERS = (
    *("steps", "seed", "global_batch", "seq_len", "warmup_steps", "optimizer", "decay", "nesterov", "adjust_lr"),
    *("variable_length", "document_mask", "masked_samples", "all_valid", "last_batch"),
)
"""Fields of the recipe that are of the optimizer or of the data, which have solvers of their own."""
OF_CLAIMS = ("collective_order", "initial_weights", "process_groups", "settings")
"""Checks of structure that no request makes pass."""
CHOICES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "features": {**FEATURE_CHOICES, **OR_SWITCHED},
    "training": RECIPE_CHOICES,
    "traits": TRAIT_CHOICES,
}
NONE = Result("", Verdict.PASS)
PAIRS = 300  # pairs of values that are looked at for one check

Values = Mapping[tuple[str, str], Any]
"""(part of the request: features, training, traits; field) -> value."""


@dataclass(frozen=True)
class Neighbour:
    """What is requested in place of what was, in one field or two."""

    values: Values
    """The other values."""
    requested: Values
    """The requested ones."""

    def assume(self, trial: Trial) -> Trial:
        """Return the trial with the reference of that recipe, judged by the requested one's bounds unless others were
        measured."""
        assumed = self.planned(trial)
        if not trial.reference.steps:
            return assumed
        if any(part == "training" for part, _ in self.values):
            assumed = replace(assumed, reference=another_recipe(trial, assumed.case.training).reference)
        return replace(assumed, reference=replace(assumed.reference, noise=_noise(trial, assumed)))

    def planned(self, trial: Trial) -> Trial:
        """Return the trial with the plan of that request, which is all that checks of structure need."""
        case = self.case(trial.case)
        traits = self.traits(trial.traits)
        if {("features", "fsdp_units"), ("features", "wrapper"), ("traits", "fsdp_units")} & self.values.keys():
            observed = measured(case, traits, trial.run).measured
            known = replace(traits.measured, units=observed.units, flat_order=observed.flat_order)
            traits = replace(traits, measured=known)
        assumed = another_case(replace(trial, plan=replace(trial.plan, traits=traits)), case)
        return assumed if trial.plan.flat else flattened(assumed)

    def case(self, case: Case) -> Case:
        """Return the case with these values. Raise ValueError where there is no such case."""
        features = replace(case.features, **self._of("features"))
        training = replace(case.training, **self._of("training"))
        other = replace(case, features=features, training=training)
        if other.features.reshard_after_forward == case.features.reshard_after_forward != "default":
            other_units = self.values.get(("features", "fsdp_units")) == OBSERVED
            default = replace(features, reshard_after_forward="default")  # what units keep is claimed as well
            other = replace(other, features=default) if other_units else other
        validate(other, None, "")
        return other

    def traits(self, traits: TrainerTraits) -> TrainerTraits:
        """Return the traits with these values. Raise ValueError where there are no such traits."""
        return replace(traits, **self._of("traits"))

    def _of(self, part: str) -> dict[str, Any]:
        """Return the values of one part of the request, by field."""
        return {name: value for (part_of_value, name), value in self.values.items() if part_of_value == part}

    def hypothesis(self, trial: Trial, broken: Broken, passing: Sequence[str], lines: Lines) -> Hypothesis:
        """Return what is put to the test. passing: the checks that pass under it on one rank."""
        (part, name), *_ = self.values
        is_trait = part == "traits"
        kind = KINDS.get(name, KINDS[part])
        texts = [f"{name} {_text(value)}" for (_, name), value in self.values.items()]
        expected = " and ".join(_text(value) for value in self.requested.values())
        observed = f"{' and '.join(texts)} is observed"
        if is_trait:
            observed = f"the trainer does as with trait {' and '.join(texts)}"
        details = tuple((name, value) for (_, name), value in self.values.items())
        cause = Cause(kind, observed, expected=expected, details=details)
        if name == "fsdp_units":  # how the units differ the check has seen
            findings = broken[passing[0]].findings
            cause = Cause(kind, "", hint=extent(trial, findings), finding=first_finding(findings), details=details)
        check_lines = [finding_line(broken[check]) for check in passing if check != "traffic"]
        declaring: Lines = ()
        if part == "features":
            declaring = declarable.feature_lines(self.case(trial.case))
        if is_trait:
            declaring = declarable.declared_lines(trial.case, self._of("traits").items())
        claimed = OBSERVED in self.values.values()  # which is fitted to what is seen
        fitted = len(self.values) + is_trait + claimed
        return Hypothesis(cause, self.assume, fitted, (*check_lines, *lines, *declaring))


def _text(value: Any) -> str:
    """Return a value as it is written in the request; "none" for None."""
    return "none" if value is None else str(value)


def _noise(trial: Trial, assumed: Trial) -> Any:
    """Return the noise that bounds are made of, with the requested case's for the assumed one if none was measured for it."""
    noise = trial.reference.noise or (trial.golden.noise if trial.golden else {})
    noise_of_case = noise.get(trial.traits.noise_key(trial.case))
    return noise if noise_of_case is None else {trial.traits.noise_key(assumed.case): noise_of_case, **noise}


# ---- the space


def singles(trial: Trial) -> Iterator[Neighbour]:
    """Yield each other value of one field of the features, the recipe and the trainer's traits, of which there is a case."""
    case = trial.case
    for part, owner in (("features", case.features), ("training", case.training), ("traits", trial.traits)):
        requested = {field.name: getattr(owner, field.name) for field in fields(owner)} | _in_force(trial, part)
        for name, value in requested.items():
            for other in _choices(trial, part, name, value):
                neighbour = Neighbour({(part, name): other}, {(part, name): value})
                if other != value and _exists(neighbour, trial):
                    yield neighbour


def _in_force(trial: Trial, part: str) -> dict[str, Any]:
    """Return what None stands for, by field of a part of the request."""
    case = trial.case
    computes_in = case.training.compute_dtype or case.training.dtype
    values: dict[str, dict[str, Any]] = {
        "features": {
            "wrapper": case.wrapper,
            "reduce_dtype": case.features.reduce_dtype or computes_in,
            "fsdp_units": trial.traits.units_of(case),
            "microbatches": case.microbatches,
            "stages_per_rank": case.stages_per_rank,
        },
        "training": {"compute_dtype": computes_in},
    }
    return values.get(part, {})


def _choices(trial: Trial, part: str, name: str, value: Any) -> Iterable[Any]:
    """Return all values of a field: those that its part of the request names, both of a switch, small numbers."""
    is_the_optimizers = part == "training" and name in {*OTHERS, *unused(trial.case.training)}
    is_a_feature_too = (part, name) == ("traits", "fsdp_units")
    if is_the_optimizers or is_a_feature_too:
        return ()
    if name == "reshard_after_forward":
        degrees = [n for n in range(2, trial.case.shards) if trial.case.shards % n == 0]
        usual = ("always", "never", "default")[: 2 if trial.plan.observed is not None else 3]
        return (*usual, *degrees)  # where units are the trainer's choice the default is whatever it does
    named = CHOICES[part].get(name)
    if named is not None:
        default = part == "traits" or name in _in_force(trial, part)  # None is no separate value
        return (choice for choice in named if choice is not None or not default)
    if isinstance(value, bool):
        return (True, False)
    return range(trial.case.training.global_batch + 1) if isinstance(value, int) else ()


def _exists(neighbour: Neighbour, trial: Trial) -> bool:
    """Return whether there are such a case and such traits."""
    try:
        neighbour.case(trial.case)
        neighbour.traits(trial.traits)
    except ValueError:
        return False
    return True


# ---- what is put to the test


def neighbours(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield the layouts and requests under which a failing check of structure passes: of one field; of two where none does."""
    hypotheses = list(other_layouts(trial, broken))
    yield from hypotheses
    if "declared" not in trial.run.provided:
        return
    if any(hypothesis.cause.kind == "another layout" for hypothesis in hypotheses):
        return
    looks = {name: _Look.at(trial, result) for name, result in broken.items() if _is_structure(name)}
    placements = broken.get("placements", NONE).findings
    if trial.case.wrapper == "fsdp1" and any(finding.kind == "unit" for finding in placements):
        looks = {}  # of its vectors all else follows
    telling: dict[str, list[Neighbour]] = {name: [] for name in looks}
    lines = tuple(traffic_lines(trial)) if "traffic" in broken else ()
    explained = set[str]()
    if looks:
        for neighbour in singles(trial):
            results = {name: look.under(neighbour) for name, look in looks.items()}
            passing = [name for name, result in results.items() if result.verdict is Verdict.PASS]
            finding_else = [name for name, result in results.items() if looks[name].finds_else(result)]
            if passing and not finding_else:
                explained |= {*passing}
                yield neighbour.hypothesis(trial, broken, passing, lines)
            for name in finding_else:
                telling[name].append(neighbour)
    if not explained:
        for name, candidates in telling.items():
            for pair in itertools.islice(_pairs(candidates, trial), PAIRS):
                if looks[name].under(pair).verdict is Verdict.PASS:
                    yield pair.hypothesis(trial, broken, [name], lines)
    yield from _nothing_cut(trial, broken)


def _is_structure(name: str) -> bool:
    """Return whether a request may make this check pass: it judges structure, or samples."""
    return name == "samples" or (all_checks()[name].STAGE == "structure" and name not in OF_CLAIMS)


def _pairs(candidates: Iterable[Neighbour], trial: Trial) -> Iterator[Neighbour]:
    """Yield two values of different fields, by both of which a check finds something else."""
    for first, second in itertools.combinations(candidates, 2):
        if first.values.keys().isdisjoint(second.values):
            pair = Neighbour({**first.values, **second.values}, {**first.requested, **second.requested})
            if _exists(pair, trial):
                yield pair


@dataclass(frozen=True)
class _Look:
    """One failing check, at the rank of its first finding alone; of all ranks where it passes there."""

    name: str
    trial: Trial
    alone: Trial
    findings: frozenset[Finding]

    @classmethod
    def at(cls, trial: Trial, result: Result) -> _Look:
        """Return the failing check of this result, at the rank of its first finding."""
        ranks = (*(rank for rank in result.findings[0].ranks if rank in trial.ranks), min(trial.ranks))
        run = replace(trial.run, ranks={ranks[0]: trial.ranks[ranks[0]]}, chosen=ranks[:1])
        alone = trial if result.check == "samples" else replace(trial, run=run)
        return cls(result.check, trial, alone, frozenset((*result.findings, *_judged(result.check, alone).findings)))

    def under(self, neighbour: Neighbour) -> Result:
        """Return the check's result under another request."""
        result = _judged(self.name, neighbour.planned(self.alone))
        return _judged(self.name, neighbour.planned(self.trial)) if result.verdict is Verdict.PASS else result

    def finds_else(self, result: Result) -> bool:
        """Return whether the result has a finding that there was not before."""
        return not self.findings >= {*result.findings}


def _judged(name: str, trial: Trial) -> Result:
    """Return the result of one check on this trial."""
    return run_check(name, all_checks()[name].check, trial)


# ---- ZeRO


def _nothing_cut(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield that ZeRO-1 or 2 ran as ZeRO-0, which is DDP.

    Then whole gradients are reduced, and every rank's optimizer has all of them.
    """
    if trial.case.wrapper in ("zero1", "zero2") and "memory" in broken:
        cause = Cause("another stage of ZeRO", "wrapper zero0 is observed", expected=trial.case.wrapper)
        yield Hypothesis(cause, _as_replicas, 1, (finding_line(broken["memory"]),))


def _as_replicas(trial: Trial) -> Trial:
    """Return the trial with the traffic of DDP and the vectors of ZeRO, of which each rank has all."""
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
