"""Sketches of all ranks of a recorded job, added up to those of whole tensors: each distinct slice once."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from harness.evidence.sketches import BUCKETS, RankSketches, Sketch, boxes_of
from harness.evidence.text import counted, names_text, ranks_text

CELLS = 1 << 22
"""Pieces of a parameter that its slices may cut it into."""
SAME = 1e-6
"""How far sketches of replicas may be apart, relative to their length: sums are kept in float32."""
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
    """By place of which ranks hold different elements: ranks and their sketches."""

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
    """By parameter, shape of the whole one."""
    dtypes: Mapping[str, str]
    """By parameter, its dtype."""
    whole: Mapping[Key, Whole]
    """Tensors of which each element is held by some rank."""
    unknown: Mapping[Key, str]
    """By tensor that is not whole, why."""
    rows: Mapping[int, Counter[int]]
    """By step, digest of a row of samples: how often any rank was fed it."""
    tokens: Mapping[int, tuple[int, ...]]
    """By step, one number for all tokens of each rank that was fed any."""
    norms: Mapping[int, Mapping[int, float]]
    """By step and rank, the norm that torch's clipping function returned."""
    rates: Mapping[int, tuple[float, ...]]
    """By step, the learning rates that ranks had."""
    optimizers: tuple[str, ...]
    """Optimizers of all ranks, each in one line."""
    computes_in: str
    """Dtype of the forward pass."""
    noise: str
    """Dtype by one rounding of which first weights were altered; empty if they were not."""

    @property
    def steps(self) -> list[int]:
        return sorted({step for step, _, _ in self.whole} - {0})


def added_up(ranks: Iterable[RankSketches]) -> Numbers:
    """Return the sums of what ranks left. One rank's are taken at a time, so that many need little memory."""
    shapes, dtypes, unplaced = dict[str, tuple[int, ...]](), dict[str, str](), dict[str, str]()
    places: dict[Key, dict[str, int]] = defaultdict(dict)
    whole: dict[Key, Whole] = {}
    firsts: dict[tuple[Key, str], tuple[int, Sketch]] = {}
    fed, tokens, norms = defaultdict[int, list](list), defaultdict(list), defaultdict[int, dict](dict)
    rates, optimizers, world, seen, words = defaultdict(set), dict[str, None](), 0, list[int](), {"": ""}
    clash: dict[str, str] = {}
    for one in ranks:
        world, words = max(world, one.world), words | {"computes": one.computes_in, "noise": one.noise}
        seen.append(one.rank)
        unplaced |= {fqn: f"{why} (rank {one.rank})" for fqn, why in one.unplaced.items() if fqn not in unplaced}
        for fqn, shape in one.shapes.items():
            if shapes.setdefault(fqn, shape) != shape:
                clash[fqn] = (
                    f"ranks have tensors of shape {shapes[fqn]} and {shape} of it, and nothing says how they fit"
                )
        dtypes |= one.dtypes
        optimizers |= dict.fromkeys(one.optimizers)
        for step in one.rows:
            fed[step].append((step in one.tokens, one.rows[step]))
        for step, number in one.tokens.items():
            tokens[step].append(number)
        for step, norm in one.norms.items():
            norms[step][one.rank] = norm
        for step, rate in one.rates.items():
            rates[step].add(rate)
        for sketch in one.sketches:
            _add(whole, places, firsts, one.rank, sketch)
    unknown: dict[Key, str] = {}
    for key in list(whole):
        why = clash.get(key[2]) or unplaced.get(key[2]) or _why_not_whole(key[2], shapes, places[key])
        if why:
            unknown[key] = why
            del whole[key]
    return Numbers(
        world=world,
        ranks=tuple(sorted(seen)),
        shapes=shapes,
        dtypes=dtypes,
        whole=whole,
        unknown=unknown | {(0, "weights", fqn): why for fqn, why in unplaced.items()},
        rows={step: _rows_of(of) for step, of in fed.items()},
        tokens={step: tuple(of) for step, of in tokens.items()},
        norms=norms,
        rates={step: tuple(sorted(of)) for step, of in rates.items()},
        optimizers=tuple(optimizers),
        computes_in=words.get("computes", ""),
        noise=words.get("noise", ""),
    )


def _add(
    whole: dict[Key, Whole],
    places: dict[Key, dict[str, int]],
    firsts: dict[tuple[Key, str], tuple[int, Sketch]],
    rank: int,
    sketch: Sketch,
) -> None:
    key = (sketch.step, sketch.kind, sketch.fqn)
    total = whole.get(key)
    if total is None:
        total = whole[key] = Whole(np.zeros(BUCKETS))
    if sketch.place not in places[key]:
        places[key][sketch.place] = sketch.elements
        firsts[key, sketch.place] = rank, sketch
        total.sums += sketch.sums
        total.squares += sketch.squares
        return
    first_rank, first = firsts[key, sketch.place]
    differ = np.linalg.norm(sketch.sums - first.sums) > SAME * max(float(np.linalg.norm(first.sums)), 1e-300)
    if differ or sketch.place in total.replicas:
        held = total.replicas.setdefault(sketch.place, [(first_rank, first.sums)])
        held.append((rank, sketch.sums))


def _rows_of(fed: list[tuple[bool, dict[int, int]]]) -> Counter[int]:
    """Return how often each row was fed. Later stages of a pipeline are fed no integers, as the first one is."""
    integers = any(is_integer for is_integer, _ in fed)
    total = Counter[int]()
    for is_integer, rows in fed:
        total.update(rows if is_integer == integers else {})
    return total


def _why_not_whole(fqn: str, shapes: Mapping[str, tuple[int, ...]], places: Mapping[str, int]) -> str:
    """Why slices do not make up the parameter, each element once; empty if they do."""
    wanted = math.prod(shapes[fqn]) if fqn in shapes else None
    bases = {place.partition("+")[0]: size for place, size in places.items()}
    total = sum(bases.values())
    if wanted is None or total != wanted:
        return f"ranks that left numbers hold {total} of its {wanted} elements"
    return "" if _is_tiled(tuple(sorted(bases)), shapes[fqn]) else "slices of ranks overlap"


def _is_tiled(places: tuple[str, ...], shape: tuple[int, ...]) -> bool:
    """Whether no two slices have an element in common, of as many as there are in all."""
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
