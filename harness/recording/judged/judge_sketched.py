"""Sketches of all ranks of a recorded job, added up to those of whole tensors: each distinct slice once."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from harness.core.evidence.text import counted, names_text, ranks_text
from harness.recording.sketches import AFTER_PASS, BUCKETS, BY_ROWS, WEIGHTS, RankSketches, Sketch, boxes_of

CELLS = 1 << 22
"""Pieces of a parameter that its slices may cut it into."""
SAME = 1e-6
"""How far sketches of replicas may differ, relative to their length: sums are kept in float32."""
UNCLAIMED = (
    "ranks begin with different numbers of it, and nothing claims that it is cut: declare how it is (--sharded), or let all"
    " ranks begin alike"
)
NOT_FINITE = "the first recording has numbers in it that are not finite, by which nothing is judged"
Key = tuple[int, str, str]
"""Step, kind, fqn."""


@dataclass
class Whole:
    """One tensor in one step."""

    sums: np.ndarray
    """Its sketch. float64 [BUCKETS]"""
    squares: float = 0.0
    """Sum of squares of its elements."""
    replicas: dict[str, list[tuple[int, np.ndarray]]] = field(default_factory=dict)
    """Place of which ranks hold different elements -> ranks and their sketches."""

    @property
    def length(self) -> float:
        """Length of the sketch, which estimates that of the tensor."""
        return float(np.linalg.norm(self.sums))

    @property
    def norm(self) -> float:
        return math.sqrt(max(self.squares, 0.0))


@dataclass(frozen=True)
class Numbers:
    """What all ranks of a job left of numbers."""

    world: int
    """Number of ranks of the job."""
    ranks: tuple[int, ...]
    """Ranks that left numbers."""
    shapes: Mapping[str, tuple[int, ...]]
    """Parameter -> shape of the whole one."""
    dtypes: Mapping[str, str]
    """Parameter -> its dtype."""
    whole: Mapping[Key, Whole]
    """Tensors of which each element is held by some rank."""
    unknown: Mapping[Key, str]
    """Tensor that is not whole -> why."""
    rows: Mapping[int, Counter[int]]
    """Step -> digest of a row of samples: how often any rank was fed it."""
    tokens: Mapping[int, tuple[int, ...]]
    """Step -> one number for all tokens of each rank that was fed any."""
    norms: Mapping[int, Mapping[int, float]]
    """Step and rank -> the norm that torch's clipping function returned."""
    norms_off: Mapping[int, float]
    """Step -> by which part torch's own norm of one rank's gradient was off, at most."""
    scales: Mapping[int, tuple[float, ...]]
    """Step -> what ranks' loss scalers multiplied the loss by."""
    rates: Mapping[int, tuple[float, ...]]
    """Step -> the learning rates that ranks had."""
    optimizers: tuple[str, ...]
    """Optimizers of all ranks, each in one line."""
    computes_in: str
    """Dtype of the forward pass."""
    noise: str
    """Dtype by one rounding of which first weights were altered; empty if they were not."""
    bare: Mapping[int, int] = field(default_factory=dict)
    """By digest of a row, that of the row without the equal tokens that it ends with."""
    passes: Mapping[int, Mapping[int, tuple[tuple[int, ...], ...]]] = field(default_factory=dict)
    """Step and rank -> for each pass, digests of the rows that the rank was fed."""
    after_pass: Mapping[tuple[int, int], Mapping[str, np.ndarray]] = field(default_factory=dict)
    """Step and number of a pass from 1 -> by parameter, the sketch of what was accumulated until then."""
    by_rows: Mapping[tuple[int, str], Mapping[str, np.ndarray]] = field(default_factory=dict)
    """Step and parameter -> the sketches of its gradient's blocks of rows, such as 0:16."""
    changed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Step -> parameters that some rank has others of as it begins than after the step before."""
    drawn: Mapping[int, Mapping[int, tuple[int, int]]] = field(default_factory=dict)
    """Step and rank -> digests of torch's generators before and after the step's first pass."""
    tp: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks among which parameters are claimed to be cut for tensor parallelism."""
    after: int = 0
    """Step that training starts after: 0, or the one whose checkpoint a job went on from. Earlier ones are not compared."""
    rescaled: Mapping[int, float] = field(default_factory=dict)
    """Step -> by what its gradients were divided, as clipping in one recording alone was seen in them."""
    unfinished: frozenset[int] = frozenset()
    """Steps in which some rank was fed samples and its optimizer did not step."""

    @property
    def steps(self) -> list[int]:
        """Recorded steps that are compared, whether or not all of their tensors are known."""
        return sorted({step for step, _, _ in (*self.whole, *self.unknown) if step > self.after})


def added_up(ranks: Iterable[RankSketches]) -> Numbers:
    """Return the sums of what ranks left. One rank's are taken at a time, so that many need little memory."""
    total = _Total()
    for one in ranks:
        total.add(one)
    return total.numbers()


class _Total:
    """What was added up so far."""

    def __init__(self) -> None:
        self.world, self.computes_in, self.noise = 0, "", ""
        self.seen, self.plain, self.tp = list[int](), set[str](), set[tuple[int, ...]]()
        self.shapes, self.dtypes = dict[str, tuple[int, ...]](), dict[str, str]()
        self.why: dict[str, str] = {}
        self.whole = dict[Key, Whole]()
        self.places: dict[Key, dict[str, int]] = defaultdict(dict)
        self.firsts = dict[tuple[Key, str], tuple[list[int], np.ndarray]]()
        self.fed: dict[int, dict[int, tuple[bool, tuple[tuple[int, ...], ...]]]] = defaultdict(dict)
        self.after_pass: dict[tuple[int, int], dict[str, np.ndarray]] = defaultdict(dict)
        self.tokens, self.norms = defaultdict[int, list[int]](list), defaultdict[int, dict[int, float]](dict)
        self.scales, self.changed = defaultdict[int, set[float]](set), dict[int, tuple[str, ...]]()
        self.bare, self.norms_off = dict[int, int](), dict[int, float]()
        self.drawn = defaultdict[int, dict[int, tuple[int, int]]](dict)
        self.rates, self.optimizers = defaultdict[int, set[float]](set), dict[str, None]()
        self.unfinished = set[int]()

    def add(self, one: RankSketches) -> None:
        """Add what one rank left."""
        self.world, self.computes_in, self.noise = max(self.world, one.world), one.computes_in, one.noise
        self.seen.append(one.rank)
        self.plain |= {*one.plain}
        self.tp |= {one.tp} - {()}
        self.why |= {fqn: f"{why} (rank {one.rank})" for fqn, why in one.unplaced.items() if fqn not in self.why}
        for fqn, shape in one.shapes.items():
            if (first := self.shapes.setdefault(fqn, shape)) != shape:
                self.why[fqn] = f"ranks have tensors of shape {first} and {shape} of it, and nothing says how they fit"
        self.dtypes |= one.dtypes
        self.optimizers |= dict.fromkeys(one.optimizers)
        self.bare |= one.bare
        for step, scale in one.scales.items():
            self.scales[step].add(scale)
        for step, passes in one.passes.items():
            self.fed[step][one.rank] = step in one.tokens, passes
        for step, number in one.tokens.items():
            self.tokens[step].append(number)
        for step, norm in one.norms.items():
            self.norms[step][one.rank] = norm
        for step, names in one.changed.items():
            self.changed[step] = tuple(dict.fromkeys((*self.changed.get(step, ()), *names)))
        for step, pair in one.drawn.items():
            self.drawn[step][one.rank] = pair
        for step, off in one.norms_off.items():
            self.norms_off[step] = max(off, self.norms_off.get(step, 0.0))
        for step, rate in one.rates.items():
            self.rates[step].add(rate)
        stepped = {*one.rates} | {sketch.step for sketch in one.sketches if sketch.kind == WEIGHTS}
        self.unfinished |= {*one.passes} - stepped
        for sketch in one.sketches:
            if sketch.kind.startswith(AFTER_PASS):
                number = int(sketch.kind.removeprefix(AFTER_PASS))
                self.after_pass[sketch.step, number][sketch.fqn] = sketch.sums
            else:
                self._add(one.rank, sketch)

    def _add(self, rank: int, sketch: Sketch) -> None:
        """Add a slice that no rank had yet; compare one that another rank had."""
        key = (sketch.step, sketch.kind, sketch.fqn)
        if (total := self.whole.get(key)) is None:
            total = self.whole[key] = Whole(np.zeros(BUCKETS))
        if sketch.place not in self.places[key]:
            self.places[key][sketch.place] = sketch.elements
            self.firsts[key, sketch.place] = [rank], sketch.sums
            total.sums += sketch.sums
            total.squares += sketch.squares
            return
        alike, first = self.firsts[key, sketch.place]
        differ = np.linalg.norm(sketch.sums - first) > SAME * max(float(np.linalg.norm(first)), 1e-300)
        if differ or sketch.place in total.replicas:
            held = total.replicas.setdefault(sketch.place, [(one, first) for one in alike])
            held.append((rank, sketch.sums))
        else:
            alike.append(rank)

    def numbers(self) -> Numbers:
        """Return whole tensors, and why others are not."""
        for fqn in self.plain:
            first = self.whole.get((0, WEIGHTS, fqn))
            if first is not None and first.replicas:
                self.why.setdefault(fqn, UNCLAIMED)
        whole, unknown = dict[Key, Whole](), {(0, WEIGHTS, fqn): why for fqn, why in self.why.items()}
        by_rows: dict[tuple[int, str], dict[str, np.ndarray]] = defaultdict(dict)
        for key, one in self.whole.items():
            if key[1].startswith(BY_ROWS):
                by_rows[key[0], key[2]][key[1].removeprefix(BY_ROWS)] = one.sums
            elif why := self.why.get(key[2]) or _why_not_whole(key[2], self.shapes, self.places[key]):
                unknown[key] = why
            else:
                whole[key] = one
        passes = {step: _fed(of) for step, of in self.fed.items()}
        return Numbers(
            world=self.world,
            ranks=tuple(sorted(self.seen)),
            shapes=self.shapes,
            dtypes=self.dtypes,
            whole=whole,
            unknown=unknown,
            rows={step: Counter(chain(*chain(*of.values()))) for step, of in passes.items()},
            tokens={step: tuple(of) for step, of in self.tokens.items()},
            norms=self.norms,
            norms_off=self.norms_off,
            scales={step: tuple(sorted(of)) for step, of in self.scales.items()},
            rates={step: tuple(sorted(of)) for step, of in self.rates.items()},
            optimizers=tuple(self.optimizers),
            computes_in=self.computes_in,
            noise=self.noise,
            bare=self.bare,
            passes=passes,
            after_pass=self.after_pass,
            by_rows=by_rows,
            drawn=self.drawn,
            changed=self.changed,
            tp=tuple(sorted(self.tp)),
            unfinished=frozenset(self.unfinished),
        )


def _fed(of: Mapping[int, tuple[bool, tuple[tuple[int, ...], ...]]]) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Return what ranks were fed. Later stages of a pipeline are fed no integers, as the first one is."""
    integers = any(is_integer for is_integer, _ in of.values())
    return {rank: passes for rank, (is_integer, passes) in of.items() if is_integer == integers}


def _why_not_whole(fqn: str, shapes: Mapping[str, tuple[int, ...]], places: Mapping[str, int]) -> str:
    """Why slices do not make up the parameter, each element once; empty if they do."""
    wanted = math.prod(shapes[fqn]) if fqn in shapes else None
    bases = {place.partition("+")[0]: size for place, size in places.items()}
    total = sum(bases.values())
    if wanted is None or total != wanted:
        return f"ranks that left numbers hold {total} of its {wanted} elements"
    return "" if _is_tiled(tuple(sorted(bases)), shapes[fqn]) else "slices of ranks overlap"


@functools.lru_cache(maxsize=64)
def _is_tiled(places: tuple[str, ...], shape: tuple[int, ...]) -> bool:
    """Whether no two slices have an element in common, of as many as there are in all. Many parameters are cut alike."""
    if len(places) == 1:
        return True
    boxes = [box for place in places for box in boxes_of(place)]
    edges = []
    for of in ([box.rows for box in boxes], [box.columns for box in boxes]):
        edges.append(np.unique([edge for intervals in of for pair in intervals for edge in pair]))
    if len(edges[0]) * len(edges[1]) > CELLS:
        return True  # nothing claims so many pieces by mistake
    counts = np.zeros((len(edges[0]), len(edges[1])), np.int32)
    for box in boxes:
        for row, column in itertools.product(box.rows, box.columns):
            (top, bottom), (left, right) = (np.searchsorted(e, of) for e, of in zip(edges, (row, column), strict=True))
            counts[top:bottom, left:right] += 1
    return int(counts.max()) <= 1


def why_unknown(numbers: Numbers, keys: Iterable[Key]) -> str:
    """Return for which parameters these are unknown, and the first reason."""
    known = [
        (fqn, numbers.unknown[step, kind, fqn]) for step, kind, fqn in keys if (step, kind, fqn) in numbers.unknown
    ]
    if not known:
        return ""
    names = list(dict.fromkeys(fqn for fqn, _ in known))
    return f"{names_text(tuple(names))}: {known[0][1]}"


def missing_ranks(numbers: Numbers) -> str:
    """Return which ranks left no numbers; empty if all did."""
    gone = sorted({*range(numbers.world)} - {*numbers.ranks})
    return f"{counted(len(gone), 'rank')} left no numbers: {ranks_text(gone)}" if gone else ""


def of_finite(numbers: Numbers) -> Numbers:
    """Return the same without tensors that hold numbers which are not finite: nothing is judged by these."""
    gone = {key: NOT_FINITE for key, one in numbers.whole.items() if not math.isfinite(one.length)}
    whole = {key: one for key, one in numbers.whole.items() if key not in gone}
    return replace(numbers, whole=whole, unknown={**numbers.unknown, **gone})


def of_shapes(numbers: Numbers, shapes: Mapping[str, tuple[int, ...]]) -> Numbers:
    """Return the same without parameters that have other shapes in another recording: ranks may hold parts of these."""
    why = {
        fqn: f"it has shape {own} here and {shapes[fqn]} in the first recording: if it is cut, declare how (--sharded)"
        for fqn, own in numbers.shapes.items()
        if shapes.get(fqn, own) != own
    }
    gone = {key: why[key[2]] for key in numbers.whole if key[2] in why}
    whole = {key: one for key, one in numbers.whole.items() if key not in gone}
    return replace(numbers, whole=whole, unknown={**numbers.unknown, **gone})
