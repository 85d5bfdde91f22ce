"""Facts of checks of structure: a check's first finding is the cause, and the table says of which kind it is.

A row names a finding by its check and quantity, and says which other checks fail because of it. The earliest finding of
a check counts, and of equally early ones the row that comes first: what follows stands behind what it follows from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from harness.core.causes import declarable
from harness.core.causes.differences import GRADIENT_CHECKS, observed_gradients
from harness.core.causes.hypothesis import NOT_TESTED, Broken, Fact, fact_with_text
from harness.core.causes.words import elsewhere_text, extent_text, first_finding, traffic_lines
from harness.core.checks import features, placements, reshard, traffic
from harness.core.judge import compiled_code, output_layer, policies, saved_hooks, tolerance
from harness.core.judge.contents import view_of_slice
from harness.core.judge.finding import Finding
from harness.core.judge.result import Cause, Lines
from harness.core.judge.trial import Trial
from harness.core.plan.slices import BYTES, Slice, local_numel, numel

LOSS_AND_GRADIENT_CHECKS = ("loss", "gradients", "grad_norm", "reported_loss")
ODD_TRACES = "odd traces"
ANOTHER_FEATURE = "another feature"
ANOTHER_POLICY = "another policy after forward"


@dataclass(frozen=True)
class StructureRow:
    """A row of the table: findings of a check that are a cause by themselves."""

    check: str
    kind: str
    quantity: str
    """The quantity of such findings; with a star before it, what their quantity ends with."""
    consequences: tuple[str, ...] = ()
    """Other checks that this is the whole content of."""
    fails_with: tuple[str, ...] = ()
    """Checks of which one fails as well, if any are named."""
    unless_failing: tuple[str, ...] = ()
    """Checks of which none may fail: else it follows from that."""
    wrappers: tuple[str, ...] = ()
    """Wrappers that it is seen of; empty: of all."""
    field_values: tuple[tuple[str, str], ...] = ()
    """Other fields of the finding and what they are."""
    declares: Callable[[Trial], Iterable[declarable.Declared]] | None = None
    """(trial) -> allowances and traits that declare it, as a trainer may do it by choice."""
    condition: Callable[[Broken], bool] | None = None
    """(failing results by check) -> whether it is so; None: in any case."""

    def matches(self, trial: Trial, broken: Broken, finding: Finding) -> bool:
        """Return whether this finding is the cause that the row names, given what else fails."""
        has_quantity = finding.quantity == self.quantity
        if self.quantity[:1] == "*":
            has_quantity = finding.quantity.endswith(self.quantity[1:])
        has_fields = all(getattr(finding, name) == value for name, value in self.field_values)
        has_wrapper = not self.wrappers or trial.case.wrapper in self.wrappers
        fails_beside = not self.fails_with or any(name in broken for name in self.fails_with)
        passes_test = self.condition is None or self.condition(broken)
        fits = has_quantity and has_fields and has_wrapper and fails_beside and passes_test
        return fits and not any(name in broken for name in self.unless_failing)


def _is_not_gathered_again(broken: Broken) -> bool:
    """Return whether `traffic` found that forward gathers less than planned.

    Forward then computes with weights from before the step.
    """
    findings = broken["traffic"].findings if "traffic" in broken else ()
    return any((finding.name, finding.phase) == ("all_gather", "forward") and _is_less(finding) for finding in findings)


def _has_narrower_sums(broken: Broken) -> bool:
    """Return whether only sums of backward move fewer bytes than planned, as the observed dtype explains.

    False if `traffic` does not fail, or has any other finding. Precondition: `features` fails.
    """
    findings = broken["traffic"].findings if "traffic" in broken else ()
    sums = [
        finding
        for finding in findings
        if finding.phase == "backward" and finding.name in ("all_reduce", "reduce_scatter")
    ]
    ratios = []
    for finding in broken["features"].findings:
        if finding.quantity == features.REDUCED:
            for dtype in str(finding.observed).split(" and "):
                ratios.append(BYTES.get(dtype, 1) / BYTES[str(finding.expected)])
    least = min(ratios, default=1)
    return bool(sums) and len(sums) == len(findings) and all(_is_less(finding, least) for finding in sums)


def _is_less(finding: Finding, least: float = 0) -> bool:
    """Return whether a finding's observed integer is less than the expected one, and at least this share of it."""
    are_numbers = isinstance(finding.expected, int) and isinstance(finding.observed, int)
    return are_numbers and least * finding.expected <= finding.observed < finding.expected  # type: ignore[operator]


FORMATS = sorted({format for format, _ in features.QUANTIZED_MATMULS.values()})
UNIT_FIELDS = (("kind", "unit"),)
UNIT_CHECKS = ("reshard", "traffic", "memory")
OLD_VALUE_CHECKS = ("replica_agreement", *LOSS_AND_GRADIENT_CHECKS)
ZERO_WRAPPERS = ("zero1", "zero2")
STRUCTURE_ROWS = (
    StructureRow("features", ANOTHER_FEATURE, features.DTYPE, (*UNIT_CHECKS, *GRADIENT_CHECKS)),
    StructureRow(
        "features", ODD_TRACES, "data-parallel wrapper", ("placements", "shard_contents", "reshard", "traffic")
    ),
    StructureRow("features", ODD_TRACES, compiled_code.GRAPHS, declares=declarable.allow_graphs),
    *(StructureRow("features", ODD_TRACES, quantity) for quantity in ("graph breaks", "limits reached")),
    *(StructureRow("features", ODD_TRACES, f"{format} matmuls", tuple(GRADIENT_CHECKS)) for format in FORMATS),
    StructureRow("features", ODD_TRACES, features.REDUCED, ("traffic",), condition=_has_narrower_sums),
    *(StructureRow("features", ODD_TRACES, quantity) for quantity in (features.REDUCED, features.BUCKET)),
    *(
        StructureRow(
            "features",
            ODD_TRACES,
            quantity,
            field_values=(("name", output_layer.OUTPUT),),
            declares=declarable.chunk_traits_of_calls,
        )
        for quantity in (output_layer.CALLS, output_layer.RECOMPUTATIONS)
    ),
    *(StructureRow("features", ODD_TRACES, quantity) for quantity in (features.RECOMPUTATIONS, features.RECOMPUTED)),
    StructureRow("features", ODD_TRACES, features.ATTENDED_AGAIN),
    StructureRow("features", ODD_TRACES, compiled_code.RECOMPILED),
    StructureRow("features", ODD_TRACES, saved_hooks.SAVED_TENSOR_HOOKS, declares=declarable.allow_hooks),
    StructureRow("features", ODD_TRACES, features.OUTSIDE_MATMULS, declares=declarable.allow_matmuls),
    StructureRow(
        "features",
        ODD_TRACES,
        features.ATTENDED,
        unless_failing=("loss", "samples"),
        declares=declarable.allow_any_attention,
    ),
    StructureRow(
        "features",
        ODD_TRACES,
        features.UNEVEN,
        unless_failing=("loss", "samples"),
        declares=declarable.chunk_traits_of_matmuls,
    ),
    StructureRow("schedule", "other actions", "*"),
    StructureRow("placements", "ranks disagree on units", placements.DIFFERING_UNITS),
    StructureRow(
        "placements", "other units", placements.LEFT_OUT_PARAMETERS, ("shard_contents", *UNIT_CHECKS, *GRADIENT_CHECKS)
    ),
    StructureRow(
        "placements", "other units", "", ("shard_contents", *UNIT_CHECKS), field_values=UNIT_FIELDS, wrappers=("fsdp1",)
    ),
    StructureRow("placements", "other units", "", field_values=UNIT_FIELDS),
    StructureRow("reshard", "left gathered by evaluation", f"*{reshard.AFTER_EVALUATION}", ("traffic",)),
    StructureRow("reshard", ANOTHER_POLICY, f"*{reshard.AFTER_FORWARD}", ("traffic",)),
    StructureRow(
        "reshard",
        "left gathered by backward",
        f"*{reshard.AFTER_BACKWARD}",
        ("traffic", "memory", "update", *OLD_VALUE_CHECKS),
        OLD_VALUE_CHECKS,
        condition=_is_not_gathered_again,
    ),
    StructureRow(
        "reshard",
        "left gathered by backward",
        f"*{reshard.AFTER_BACKWARD}",
        ("traffic", "memory"),
        declares=declarable.allow_gathered,
    ),
    StructureRow(
        "traffic",
        ANOTHER_FEATURE,
        traffic.IN_ANOTHER_DTYPE,
        tuple(GRADIENT_CHECKS),
        field_values=(("phase", "pipeline"),),
    ),
    *(
        StructureRow(
            "traffic",
            "parameters not gathered",
            quantity,
            OLD_VALUE_CHECKS,
            OLD_VALUE_CHECKS[:1],
            (),
            ZERO_WRAPPERS,
            like,
        )
        for quantity, like in ((traffic.UPDATED_PARAMETERS, ()), ("", (("name", "all_gather"), ("phase", "forward"))))
    ),
    StructureRow("shard_contents", "other slices", "slice", ("placements",), unless_failing=("initial_weights",)),
)


def facts_of_structure(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Yield at most one fact for each check of the table, of its earliest finding, then one on shifted gradients.

    Nothing for checks that do not fail, or whose findings are in no row.
    """
    for check in dict.fromkeys(row.check for row in STRUCTURE_ROWS):
        rows = [row for row in STRUCTURE_ROWS if row.check == check]
        findings = broken[check].findings if check in broken else ()
        candidates = []
        for finding in findings:
            for number, row in enumerate(rows):
                if row.matches(trial, broken, finding):
                    candidates.append((finding.step or trial.first_step, number, finding))
        if candidates:
            _, number, finding = min(candidates, key=lambda candidate: candidate[:2])
            yield _fact_of_row(trial, broken, rows[number], finding)
    yield from _shifted_gradients(trial, broken)


def _fact_of_row(trial: Trial, broken: Broken, row: StructureRow, finding: Finding) -> Fact:
    """Return the fact of a row whose cause is this finding, with its lines and the YAML that declares it, if any."""
    lines: Lines = tuple(traffic_lines(trial)) if {"traffic"} & {*row.consequences} & {*broken} else ()
    lines += NOT_TESTED if {*row.consequences} & GRADIENT_CHECKS & {*broken} else ()
    lines += declarable.declaration_and_next_finding(trial, row.check, row.declares(trial)) if row.declares else ()
    values = (finding.quantity, finding.expected, finding.observed)
    with_same_values = []
    in_same_step = []
    for other in broken[row.check].findings:
        if (other.quantity, other.expected, other.observed) == values:
            with_same_values.append(other)
        if (other.quantity, other.step) == (finding.quantity, finding.step):
            in_same_step.append(other)
    hint = extent_text(trial, with_same_values) or elsewhere_text([finding, *in_same_step])
    cause = Cause(row.kind, "", hint=hint, finding=first_finding([finding, *in_same_step]))
    return Fact(cause, (row.check, *row.consequences), lines)


def fsdp2_switches(trial: Trial) -> Lines:
    """Return a line on the switches of FSDP2 that are not as usual, which are no cause by themselves.

    Empty if all are usual.
    """
    text = policies.unusual_switches_text(trial)
    return (("switches", text),) if text else ()


# ---- ZeRO's vectors

MOST_SHIFTED_ELEMENTS = 8


def _shifted_gradients(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Yield the fact that each rank's part of ZeRO's gradient vector begins some elements too early or too late.

    Nothing without ZeRO's slices, or if no offset of up to MOST_SHIFTED_ELEMENTS fits all ranks.
    """
    if "gradients" not in broken or not trial.plan.gradient_slices:
        return
    vectors = [_gradient_vectors(trial, rank) for rank in trial.ranks]
    offsets = itertools.chain.from_iterable((count, -count) for count in range(1, MOST_SHIFTED_ELEMENTS + 1))
    for offset in offsets:
        if all(vector and _is_shifted(trial, *vector, offset) for vector in vectors):
            side = "early" if offset > 0 else "late"
            text = f"each rank's part of ZeRO's gradient vector begins {abs(offset)} elements too {side}"
            fact = fact_with_text(
                broken, "gradients", "gradients shifted", text, *LOSS_AND_GRADIENT_CHECKS, further_lines=NOT_TESTED
            )
            yield replace(fact, cause=replace(fact.cause, details=(("elements", offset),)))
            return


def _gradient_vectors(trial: Trial, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return (observed, expected, places) of a rank's gradients in its first step, each [elements].

    places: those of the expected elements in ZeRO's vector. None if observed and expected do not have equally many
    elements.
    """
    slices = trial.plan.gradient_slices[rank]
    step = trial.first_step
    names = [fqn for fqn in slices if numel(slices[fqn])]
    observed = observed_gradients(trial, rank, step)
    if any(fqn not in observed or observed[fqn].size != numel(slices[fqn]) for fqn in names):
        return None
    expected = [view_of_slice(trial.reference_step(step).gradients[fqn], slices[fqn]) for fqn in names]
    places = np.concatenate([_places_in_vector(trial, fqn, slices[fqn]) for fqn in names])
    return np.concatenate([observed[fqn] for fqn in names]), np.concatenate(expected), places


def _places_in_vector(trial: Trial, fqn: str, held_slice: Slice) -> np.ndarray:
    """Return the place in ZeRO's vectors of each element of a slice, int64 [elements].

    Vectors lie one behind the other, so distant that none is taken for another.
    """
    flat = trial.plan.flat
    size = local_numel(fqn, trial.plan.shapes[fqn], trial.plan.dims.tp)
    distance = max(unit.numel for unit in flat) + MOST_SHIFTED_ELEMENTS
    first, starts = next(
        (number * distance, unit.starts[fqn]) for number, unit in enumerate(flat) if fqn in unit.starts
    )
    places = np.concatenate([first + start + np.arange(size // len(starts)) for start in starts])
    ((begin, end),) = held_slice
    return places[begin % size :][: end - begin]


def _is_shifted(trial: Trial, observed: np.ndarray, expected: np.ndarray, places: np.ndarray, offset: int) -> bool:
    """Return whether observed elements equal the expected ones at places shifted by the offset, within the bound.

    Only places of parameters are compared, because between two of them there may be padding. False for few elements.
    Raises NoBound.
    """
    if len(observed) <= 2 * MOST_SHIFTED_ELEMENTS:
        return False
    _, expected_rows, observed_rows = np.intersect1d(places, places - offset, return_indices=True)
    difference = tolerance.relative_difference(observed[observed_rows], expected[expected_rows])
    return difference <= trial.bounds.gradient[trial.first_step]
