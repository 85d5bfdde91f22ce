"""What a check of structure saw itself: its first finding is the cause, and the table says of which kind it is.

A row names a finding by its check and quantity, and says which other checks fail because of it. The earliest finding of a
check counts, and of equally early ones the row that comes first: what follows stands behind what it follows from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from harness.core.causes import declarable
from harness.core.causes.differences import OF_GRADIENTS, seen_gradients
from harness.core.causes.hypothesis import NOT_TESTED, Broken, Fact, stated
from harness.core.causes.words import elsewhere, extent, first_finding, traffic_lines
from harness.core.checks import features, placements, reshard, traffic
from harness.core.judge import compiled_code, output_layer, policies, saved_hooks, tolerance
from harness.core.judge.contents import take
from harness.core.judge.finding import Finding
from harness.core.judge.result import Cause, Lines
from harness.core.judge.trial import Trial
from harness.core.plan.slices import BYTES, Slice, local_numel, numel

FOLLOWING = ("loss", "gradients", "grad_norm", "reported_loss")
ODD, FEATURE, POLICY = "odd traces", "another feature", "another policy after forward"


@dataclass(frozen=True)
class Row:
    """Findings of a check that are a cause by themselves."""

    check: str
    kind: str
    quantity: str
    """The quantity of such findings; with a star before it, what their quantity ends with."""
    follows: tuple[str, ...] = ()
    """Other checks that this is the whole content of."""
    beside: tuple[str, ...] = ()
    """Checks of which one fails as well, if any are named."""
    unless: tuple[str, ...] = ()
    """Checks of which none may fail: else it follows from that."""
    wrappers: tuple[str, ...] = ()
    """Wrappers that it is seen of; empty: of all."""
    like: tuple[tuple[str, str], ...] = ()
    """Other fields of the finding and what they are."""
    declares: Callable[[Trial], Iterable[declarable.Declared]] | None = None
    """What of it a trainer may do by choice."""
    test: Callable[[Broken], bool] | None = None
    """Whether it is so, by the findings of other checks; None: in any case."""

    def fits(self, trial: Trial, broken: Broken, one: Finding) -> bool:
        quantity = (
            one.quantity.endswith(self.quantity[1:]) if self.quantity[:1] == "*" else one.quantity == self.quantity
        )
        alike = all(getattr(one, name) == value for name, value in self.like)
        wrapper = not self.wrappers or trial.case.wrapper in self.wrappers
        others = not self.beside or any(name in broken for name in self.beside)
        tested = self.test is None or self.test(broken)
        return quantity and alike and wrapper and others and tested and not any(name in broken for name in self.unless)


def _not_gathered_again(broken: Broken) -> bool:
    """Whether a forward pass gathers less than planned: then it computes with weights from before the step."""
    found = broken["traffic"].findings if "traffic" in broken else ()
    return any((one.name, one.phase) == ("all_gather", "forward") and _less(one) for one in found)


def _narrower_sums(broken: Broken) -> bool:
    """Whether nothing moves otherwise than planned but sums in backward, and of these no fewer bytes than in that dtype."""
    found = broken["traffic"].findings if "traffic" in broken else ()
    sums = [one for one in found if one.phase == "backward" and one.name in ("all_reduce", "reduce_scatter")]
    odd = [one for one in broken["features"].findings if one.quantity == features.REDUCED]
    of = [(str(one.expected), dtype) for one in odd for dtype in str(one.observed).split(" and ")]
    least = min((BYTES.get(dtype, 1) / BYTES[wanted] for wanted, dtype in of), default=1)
    return bool(sums) and len(sums) == len(found) and all(_less(one, least) for one in sums)


def _less(one: Finding, least: float = 0) -> bool:
    """Whether less was observed, and no less than this share."""
    known = isinstance(one.expected, int) and isinstance(one.observed, int)
    return known and least * one.expected <= one.observed < one.expected  # type: ignore[operator]


FORMATS = sorted({format for format, _ in features.QUANTIZED_PRODUCTS.values()})
UNIT = (("kind", "unit"),)
OF_UNITS = ("reshard", "traffic", "memory")
OF_OLD_VALUES, ZERO = ("replica_agreement", *FOLLOWING), ("zero1", "zero2")
TABLE = (
    Row("features", FEATURE, features.DTYPE, (*OF_UNITS, *OF_GRADIENTS)),
    Row("features", ODD, "data-parallel wrapper", ("placements", "shard_contents", "reshard", "traffic")),
    Row("features", ODD, compiled_code.GRAPHS, declares=declarable.graphs),
    *(Row("features", ODD, quantity) for quantity in ("graph breaks", "limits reached")),
    *(Row("features", ODD, f"{format} matmuls", tuple(OF_GRADIENTS)) for format in FORMATS),
    Row("features", ODD, features.REDUCED, ("traffic",), test=_narrower_sums),
    *(Row("features", ODD, quantity) for quantity in (features.REDUCED, features.BUCKET)),
    *(
        Row("features", ODD, quantity, like=(("name", output_layer.OUTPUT),), declares=declarable.output_calls)
        for quantity in (output_layer.CALLS, output_layer.CALLED_AGAIN)
    ),
    *(Row("features", ODD, quantity) for quantity in (features.RECOMPUTATIONS, features.RECOMPUTED)),
    Row("features", ODD, features.ATTENDED_AGAIN),
    Row("features", ODD, compiled_code.RECOMPILED),
    Row("features", ODD, saved_hooks.HOOKS, declares=declarable.hooks),
    Row("features", ODD, features.BESIDES, declares=declarable.matmuls),
    Row("features", ODD, features.ATTENDED, unless=("loss", "samples"), declares=declarable.attention),
    Row("features", ODD, features.UNEVEN, unless=("loss", "samples"), declares=declarable.projections),
    Row("schedule", "other actions", "*"),
    Row("placements", "ranks disagree on units", placements.APART),
    Row("placements", "other units", placements.LEFT_OUT, ("shard_contents", *OF_UNITS, *OF_GRADIENTS)),
    Row("placements", "other units", "", ("shard_contents", *OF_UNITS), like=UNIT, wrappers=("fsdp1",)),
    Row("placements", "other units", "", like=UNIT),
    Row("reshard", "left gathered by evaluation", f"*{reshard.AFTER_EVALUATION}", ("traffic",)),
    Row("reshard", POLICY, f"*{reshard.AFTER_FORWARD}", ("traffic",)),
    Row(
        "reshard",
        "left gathered by backward",
        f"*{reshard.AFTER_BACKWARD}",
        ("traffic", "memory", "update", *OF_OLD_VALUES),
        OF_OLD_VALUES,
        test=_not_gathered_again,
    ),
    Row(
        "reshard",
        "left gathered by backward",
        f"*{reshard.AFTER_BACKWARD}",
        ("traffic", "memory"),
        declares=declarable.gathered,
    ),
    Row("traffic", FEATURE, traffic.IN_ANOTHER_DTYPE, tuple(OF_GRADIENTS), like=(("phase", "pipeline"),)),
    *(
        Row("traffic", "parameters not gathered", quantity, OF_OLD_VALUES, OF_OLD_VALUES[:1], (), ZERO, like)
        for quantity, like in ((traffic.LACKING, ()), ("", (("name", "all_gather"), ("phase", "forward"))))
    ),
    Row("shard_contents", "other slices", "slice", ("placements",), unless=("initial_weights",)),
)


def facts_of_structure(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Yield at most one fact of each failing check."""
    for check in dict.fromkeys(row.check for row in TABLE):
        rows, findings = [row for row in TABLE if row.check == check], broken[check].findings if check in broken else ()
        fitting = ((place, one) for one in findings for place, row in enumerate(rows) if row.fits(trial, broken, one))
        found = [(one.step or trial.first_step, place, one) for place, one in fitting]
        if found:
            _, place, finding = min(found, key=lambda of: of[:2])
            yield _fact(trial, broken, rows[place], finding)
    yield from _shifted_gradients(trial, broken)


def _fact(trial: Trial, broken: Broken, row: Row, finding: Finding) -> Fact:
    lines: Lines = tuple(traffic_lines(trial)) if {"traffic"} & {*row.follows} & {*broken} else ()
    lines += NOT_TESTED if {*row.follows} & OF_GRADIENTS & {*broken} else ()
    lines += declarable.lines(trial, row.check, row.declares(trial)) if row.declares else ()
    what = (finding.quantity, finding.expected, finding.observed)
    alike = [one for one in broken[row.check].findings if (one.quantity, one.expected, one.observed) == what]
    same = [one for one in broken[row.check].findings if (one.quantity, one.step) == (finding.quantity, finding.step)]
    hint = extent(trial, alike) or elsewhere([finding, *same])
    return Fact(
        Cause(row.kind, "", hint=hint, finding=first_finding([finding, *same])), (row.check, *row.follows), lines
    )


def fsdp2_switches(trial: Trial) -> Lines:
    """Return which switches of FSDP2 are not as usual: no cause by itself."""
    seen = policies.switches(trial)
    return (("switches", seen),) if seen else ()


# ---- ZeRO's vectors

MOST_ELEMENTS = 8


def _shifted_gradients(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Yield an offset into the vector: a rank's part of the gradients lies some elements before or behind what it steps on."""
    if "gradients" not in broken or not trial.plan.gradient_slices:
        return
    vectors = [_vectors(trial, rank) for rank in trial.ranks]
    for by in (sign * count for count in range(1, MOST_ELEMENTS + 1) for sign in (1, -1)):
        if all(vector and _shifted(trial, *vector, by) for vector in vectors):
            text = f"each rank's part of ZeRO's gradient vector begins {abs(by)} elements too {'early' if by > 0 else 'late'}"
            fact = stated(broken, "gradients", "gradients shifted", text, *FOLLOWING, more=NOT_TESTED)
            yield replace(fact, cause=replace(fact.cause, details=(("elements", by),)))
            return


def _vectors(trial: Trial, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return the rank's gradients of its first step, the expected ones, and their places in ZeRO's vector. None if it has not
    one element for each expected one."""
    held, step = trial.plan.gradient_slices[rank], trial.first_step
    names = [fqn for fqn in held if numel(held[fqn])]
    seen = seen_gradients(trial, rank, step)
    if any(fqn not in seen or seen[fqn].size != numel(held[fqn]) for fqn in names):
        return None
    expected = [take(trial.reference_step(step).gradients[fqn], held[fqn]) for fqn in names]
    places = np.concatenate([_places(trial, fqn, held[fqn]) for fqn in names])
    return np.concatenate([seen[fqn] for fqn in names]), np.concatenate(expected), places


def _places(trial: Trial, fqn: str, held: Slice) -> np.ndarray:
    """Return that of each element of a slice. Vectors lie one behind the other, so distant that none is taken for another."""
    flat, size = trial.plan.flat, local_numel(fqn, trial.plan.shapes[fqn], trial.plan.dims.tp)
    apart = max(unit.numel for unit in flat) + MOST_ELEMENTS
    first, starts = next((number * apart, unit.starts[fqn]) for number, unit in enumerate(flat) if fqn in unit.starts)
    places = np.concatenate([first + start + np.arange(size // len(starts)) for start in starts])
    ((begin, end),) = held
    return places[begin % size :][: end - begin]


def _shifted(trial: Trial, seen: np.ndarray, expected: np.ndarray, places: np.ndarray, by: int) -> bool:
    """Return whether they are equal where both places are of parameters: between two of them there may be padding."""
    if len(seen) <= 2 * MOST_ELEMENTS:
        return False
    _, there, mine = np.intersect1d(places, places - by, return_indices=True)
    return tolerance.relative_difference(seen[mine], expected[there]) <= trial.bounds.gradient[trial.first_step]
