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

from harness.core.evidence.text import count_text, names_text, ranks_text
from harness.recording.sketches import AFTER_PASS, BUCKETS, BY_ROWS, WEIGHTS, Box, RankSketches, Sketch, boxes_of_text

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
    """One tensor in one step, added up from the slices that ranks hold."""

    sums: np.ndarray
    """Its sketch. float64 [BUCKETS]"""
    squares: float = 0.0
    """Sum of squares of its elements."""
    replicas: dict[str, list[tuple[int, np.ndarray]]] = field(default_factory=dict)
    """Slice text -> ranks that hold the slice, with their sketches.

    Only slices of which ranks hold different elements.
    """

    @property
    def length(self) -> float:
        """Length of the sketch, which estimates that of the tensor."""
        return float(np.linalg.norm(self.sums))

    @property
    def norm(self) -> float:
        return math.sqrt(max(self.squares, 0.0))


@dataclass(frozen=True)
class Numbers:
    """All numbers that the ranks of a job left, as sums over ranks."""

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

    @functools.cached_property
    def rows(self) -> dict[int, Counter[int]]:
        """Return, by step, how often all ranks together were fed each row of samples, by its digest."""
        rows_by_step = {}
        for step, passes_by_rank in self.passes.items():
            rows_by_step[step] = Counter(chain(*chain(*passes_by_rank.values())))
        return rows_by_step

    @property
    def steps(self) -> list[int]:
        """Recorded steps that are compared, whether or not all of their tensors are known."""
        return sorted({step for step, _, _ in (*self.whole, *self.unknown) if step > self.after})


def sum_sketches(ranks: Iterable[RankSketches]) -> Numbers:
    """Return the sums of what ranks left, each distinct slice counted once.

    One rank's sketches are taken at a time, so that many ranks need little memory.
    """
    total = _Total()
    for rank_sketches in ranks:
        total.add(rank_sketches)
    return total.numbers()


class _Total:
    """Sums of the ranks that were added so far."""

    def __init__(self) -> None:
        self.world = 0
        self.computes_in = ""
        self.noise = ""
        self.seen = list[int]()
        self.plain = set[str]()
        self.tp = set[tuple[int, ...]]()
        self.shapes = dict[str, tuple[int, ...]]()
        self.dtypes = dict[str, str]()
        self.why: dict[str, str] = {}
        self.whole = dict[Key, Whole]()
        self.places: dict[Key, dict[str, int]] = defaultdict(dict)
        self.firsts = dict[tuple[Key, str], tuple[list[int], np.ndarray]]()
        self.fed: dict[int, dict[int, tuple[bool, tuple[tuple[int, ...], ...]]]] = defaultdict(dict)
        self.after_pass: dict[tuple[int, int], dict[str, np.ndarray]] = defaultdict(dict)
        self.tokens = defaultdict[int, list[int]](list)
        self.norms = defaultdict[int, dict[int, float]](dict)
        self.scales = defaultdict[int, set[float]](set)
        self.changed = dict[int, tuple[str, ...]]()
        self.bare = dict[int, int]()
        self.norms_off = dict[int, float]()
        self.drawn = defaultdict[int, dict[int, tuple[int, int]]](dict)
        self.rates = defaultdict[int, set[float]](set)
        self.optimizers = dict[str, None]()
        self.unfinished = set[int]()

    def add(self, rank_sketches: RankSketches) -> None:
        """Add what one rank left to the sums.

        A parameter whose shapes differ between ranks gets a reason why it is not whole.
        """
        rank = rank_sketches.rank
        self.world = max(self.world, rank_sketches.world)
        self.computes_in = rank_sketches.computes_in
        self.noise = rank_sketches.noise
        self.seen.append(rank)
        self.plain |= {*rank_sketches.plain}
        self.tp |= {rank_sketches.tp} - {()}
        self.why |= {fqn: f"{why} (rank {rank})" for fqn, why in rank_sketches.unplaced.items() if fqn not in self.why}
        for fqn, shape in rank_sketches.shapes.items():
            if (first := self.shapes.setdefault(fqn, shape)) != shape:
                self.why[fqn] = f"ranks have tensors of shape {first} and {shape} of it, and nothing says how they fit"
        self.dtypes |= rank_sketches.dtypes
        self.optimizers |= dict.fromkeys(rank_sketches.optimizers)
        self.bare |= rank_sketches.bare
        for step, scale in rank_sketches.scales.items():
            self.scales[step].add(scale)
        for step, passes in rank_sketches.passes.items():
            self.fed[step][rank] = step in rank_sketches.tokens, passes
        for step, number in rank_sketches.tokens.items():
            self.tokens[step].append(number)
        for step, norm in rank_sketches.norms.items():
            self.norms[step][rank] = norm
        for step, names in rank_sketches.changed.items():
            self.changed[step] = tuple(dict.fromkeys((*self.changed.get(step, ()), *names)))
        for step, pair in rank_sketches.drawn.items():
            self.drawn[step][rank] = pair
        for step, off in rank_sketches.norms_off.items():
            self.norms_off[step] = max(off, self.norms_off.get(step, 0.0))
        for step, rate in rank_sketches.rates.items():
            self.rates[step].add(rate)
        stepped = {*rank_sketches.rates} | {sketch.step for sketch in rank_sketches.sketches if sketch.kind == WEIGHTS}
        self.unfinished |= {*rank_sketches.passes} - stepped
        for sketch in rank_sketches.sketches:
            if sketch.kind.startswith(AFTER_PASS):
                pass_number = int(sketch.kind.removeprefix(AFTER_PASS))
                self.after_pass[sketch.step, pass_number][sketch.fqn] = sketch.sums
            else:
                self._add_slice(rank, sketch)

    def _add_slice(self, rank: int, sketch: Sketch) -> None:
        """Add a slice that no rank had yet.

        If another rank had it, compare both, and note the copies in `replicas` if they differ.
        """
        key = (sketch.step, sketch.kind, sketch.fqn)
        if (total := self.whole.get(key)) is None:
            total = self.whole[key] = Whole(np.zeros(BUCKETS))
        if sketch.slice_text not in self.places[key]:
            self.places[key][sketch.slice_text] = sketch.elements
            self.firsts[key, sketch.slice_text] = [rank], sketch.sums
            total.sums += sketch.sums
            total.squares += sketch.squares
            return
        ranks_alike, first = self.firsts[key, sketch.slice_text]
        differ = np.linalg.norm(sketch.sums - first) > SAME * max(float(np.linalg.norm(first)), 1e-300)
        if differ or sketch.slice_text in total.replicas:
            copies = total.replicas.setdefault(sketch.slice_text, [(rank_alike, first) for rank_alike in ranks_alike])
            copies.append((rank, sketch.sums))
        else:
            ranks_alike.append(rank)

    def numbers(self) -> Numbers:
        """Return the numbers: tensors that are whole, and for all others the reason why they are not.

        A tensor that nothing claims to be cut is not whole if ranks begin with different copies of it.
        """
        for fqn in self.plain:
            first = self.whole.get((0, WEIGHTS, fqn))
            if first is not None and first.replicas:
                self.why.setdefault(fqn, UNCLAIMED)
        whole = dict[Key, Whole]()
        unknown = {(0, WEIGHTS, fqn): why for fqn, why in self.why.items()}
        by_rows: dict[tuple[int, str], dict[str, np.ndarray]] = defaultdict(dict)
        for key, tensor in self.whole.items():
            if key[1].startswith(BY_ROWS):
                by_rows[key[0], key[2]][key[1].removeprefix(BY_ROWS)] = tensor.sums
            elif why := self.why.get(key[2]) or _why_not_whole(key[2], self.shapes, self.places[key]):
                unknown[key] = why
            else:
                whole[key] = tensor
        passes = {step: _received_rows(passes_of_ranks) for step, passes_of_ranks in self.fed.items()}
        return Numbers(
            world=self.world,
            ranks=tuple(sorted(self.seen)),
            shapes=self.shapes,
            dtypes=self.dtypes,
            whole=whole,
            unknown=unknown,
            tokens={step: tuple(numbers) for step, numbers in self.tokens.items()},
            norms=self.norms,
            norms_off=self.norms_off,
            scales={step: tuple(sorted(scales)) for step, scales in self.scales.items()},
            rates={step: tuple(sorted(rates)) for step, rates in self.rates.items()},
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


def _received_rows(
    passes_of_ranks: Mapping[int, tuple[bool, tuple[tuple[int, ...], ...]]],
) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Return by rank, for each pass, the digests of the rows that it received.

    Later stages of a pipeline receive no integers, as the first one does, and are left out. If no rank received
    integers, all stay.
    """
    integers = any(is_integer for is_integer, _ in passes_of_ranks.values())
    return {rank: passes for rank, (is_integer, passes) in passes_of_ranks.items() if is_integer == integers}


def _why_not_whole(fqn: str, shapes: Mapping[str, tuple[int, ...]], slice_sizes: Mapping[str, int]) -> str:
    """Return why slices do not make up the parameter, each element once; empty if they do.

    slice_sizes: text of a slice -> number of its elements.
    """
    wanted = math.prod(shapes[fqn]) if fqn in shapes else None
    bases = {slice_text.partition("+")[0]: size for slice_text, size in slice_sizes.items()}
    total = sum(bases.values())
    if wanted is None or total != wanted:
        return f"ranks that left numbers hold {total} of its {wanted} elements"
    return "" if _is_tiled(tuple(sorted(bases)), shapes[fqn]) else "slices of ranks overlap"


@functools.lru_cache(maxsize=64)
def _is_tiled(slice_texts: tuple[str, ...], shape: tuple[int, ...]) -> bool:
    """Return whether no two slices have an element in common. Precondition: they have as many as the parameter in all.

    True without a look if there are more than CELLS pieces: nothing claims so many by mistake. Cached, for many
    parameters are cut alike.
    """
    if len(slice_texts) == 1:
        return True
    boxes: list[Box] = []
    for slice_text in slice_texts:
        boxes += boxes_of_text(slice_text)
    row_edges = _edges([box.rows for box in boxes])
    column_edges = _edges([box.columns for box in boxes])
    if len(row_edges) * len(column_edges) > CELLS:
        return True  # nothing claims so many pieces by mistake
    counts = np.zeros((len(row_edges), len(column_edges)), np.int32)
    for box in boxes:
        for row, column in itertools.product(box.rows, box.columns):
            top, bottom = np.searchsorted(row_edges, row)
            left, right = np.searchsorted(column_edges, column)
            counts[top:bottom, left:right] += 1
    return int(counts.max()) <= 1


def _edges(intervals_of_boxes: Iterable[Iterable[tuple[int, int]]]) -> np.ndarray:
    """Return all beginnings and ends of intervals, ascending, each once. [edges]"""
    edges: list[int] = []
    for intervals in intervals_of_boxes:
        for pair in intervals:
            edges += pair
    return np.unique(edges)


def why_unknown(numbers: Numbers, keys: Iterable[Key]) -> str:
    """Return the names of the parameters of these keys that are unknown, and the first one's reason.

    Empty if none is unknown.
    """
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
    return f"{count_text(len(gone), 'rank')} left no numbers: {ranks_text(gone)}" if gone else ""


def without_nonfinite(numbers: Numbers) -> Numbers:
    """Return the numbers without tensors that hold NaN or infinity: these become unknown, for nothing is judged by them."""
    gone = {key: NOT_FINITE for key, tensor in numbers.whole.items() if not math.isfinite(tensor.length)}
    whole = {key: tensor for key, tensor in numbers.whole.items() if key not in gone}
    return replace(numbers, whole=whole, unknown={**numbers.unknown, **gone})


def without_other_shapes(numbers: Numbers, shapes: Mapping[str, tuple[int, ...]]) -> Numbers:
    """Return the numbers without parameters that have other shapes in another recording: ranks may hold slices of
    these.

    Their tensors become unknown. shapes: those of the other recording; a parameter that it lacks stays.
    """
    why = {
        fqn: f"it has shape {own} here and {shapes[fqn]} in the first recording: if it is cut, declare how (--sharded)"
        for fqn, own in numbers.shapes.items()
        if shapes.get(fqn, own) != own
    }
    gone = {key: why[key[2]] for key in numbers.whole if key[2] in why}
    whole = {key: tensor for key, tensor in numbers.whole.items() if key not in gone}
    return replace(numbers, whole=whole, unknown={**numbers.unknown, **gone})
