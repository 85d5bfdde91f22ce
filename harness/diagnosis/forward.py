"""The model computes something else than Llama 3: variations of it are tried on the first step whose loss is wrong.

Those whose losses of that step are the ones observed, rank by rank, become hypotheses: all gradients and all later steps must
then be as trained so. One number of a variation, such as an eps, is fitted to that loss; two variations are tried together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.diagnosis.assume import another_reference, order_of_entries
from harness.diagnosis.differences import loss_off, wrong_pairs
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.localise import first_wrong_input, inputs_that_differ
from harness.diagnosis.positions import wrong_positions
from harness.diagnosis.words import fed_with, from_step, on_ranks, some
from harness.judge.losses import losses
from harness.judge.received_samples import shares_of_samples
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.plan.stages import layers_of_stage, positions

if TYPE_CHECKING:
    from harness.reference.altered import Alter, Variation
    from harness.reference.counterfactual import Bench

MOST = 8  # hypotheses that are put to the test where losses have noise, and several come close
BEFORE = {  # the kinds of modules between one whose input is right and this one
    **{"inner_attention": ["attention"], "wo": ["attention", "inner"], "attention_dropout": ["inner", "block", "wo"]},
    **{"ffn_norm": ["inner", "block"], "wq": ["norm"], "attention": ["norm"], "feed_forward": ["norm"], "w1": ["norm"]},
    **{"w2": ["feed_forward"], "ffn_dropout": ["feed_forward"], "output": ["norm"], "layers.0": ["embedding"]},
    **{"norm": ["feed_forward", "block"], "attention_norm": ["feed_forward", "block", "embedding"]},
}
TINY = 1e-8  # too little of a loss to fit a number to
WIDE = 8  # layers, of which each is tried alone
NOT_THE_MODELS = {"samples", "positions", "placements", "shard_contents", "process_groups"}
"""Checks that no computation breaks: where one is broken, another mistake is there, which goes first."""


def other_forward(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    bench = first_wrong_pass(trial, broken)
    if bench is None or NOT_THE_MODELS & set(broken) - _of_the_model(trial):
        return
    found = sorted(bench.single(), key=lambda one: one.distance)[: MOST if not trial.case.exact else None]
    if not found and trial.case.exact and (loss_off(trial, bench.step) or 0.0) > TINY:
        found = list(bench.pairs()) or list(bench.fitted())
    for one in found:
        seen = first_wrong_input(trial).removeprefix(": ")
        words: dict[str, Any] = {"altered": one.altered} | ({"loss": one.loss} if one.loss else {})
        assume = partial(another_reference, **words)
        yield Hypothesis(one.cause, assume, one.numbers, (("forward", seen),) if seen else ())


def _of_the_model(trial: Trial) -> set[str]:
    """A model that receives no positions counts them itself, and may do so wrongly."""
    return {"positions"} if wrong_positions(trial) is None else set()


@dataclass(frozen=True)
class Found:
    """A variation under which the step's losses are those observed. distance: of the loss. numbers: fitted, or choices."""

    cause: Cause
    altered: Alter
    loss: Any
    distance: float
    numbers: int


def first_wrong_pass(trial: Trial, broken: Broken) -> Tries | None:
    """Of the first step whose loss is wrong, if what came before it is right."""
    if "loss" not in broken or "completed" in broken or trial.assumption.references:
        return None
    step = next((step for step in trial.case.steps if loss_off(trial, step)), None)
    if step is None or any(wrong_pairs(trial, earlier) for earlier in trial.case.steps if earlier < step):
        return None
    if step > 1 and {"update", "resume"} & set(broken):
        return None
    bench = Tries(trial, step)
    return bench if bench.observed and not bench.as_usual else None


def bench_of(trial: Trial, step: int, **words: Any) -> Bench:
    """words: of the order of rows, where that is another than the trainer says."""
    from harness.reference.counterfactual import Batch, Bench

    reference, length = trial.reference, trial.case.seq_len(step)
    at = [reference.sample_ids.index(id_) for id_ in reference.samples[step - 1]]
    batch = Batch(reference.tokens[at, :length], reference.labels[at, :length])
    weights = reference.weights if step == 1 else reference.steps[step - 2].parameters
    return Bench(trial.case.model, trial.case.training, weights, batch, step, **(order_of_entries(trial) | words))


@dataclass(frozen=True)
class Tries:
    """One forward pass of a step, by the weights before it, of all its samples."""

    trial: Trial
    step: int

    @cached_property
    def rows(self) -> dict[int, np.ndarray]:
        """By data-parallel share, the rows of the step's batch that it computes."""
        order = {id_: row for row, id_ in enumerate(self.trial.reference.samples[self.step - 1])}
        shares = shares_of_samples(self.trial, self.step)
        if any(id_ not in order for ids in shares.values() for id_ in ids):
            return {}
        return {rank: np.array([order[id_] for id_ in ids if id_ is not None]) for rank, ids in shares.items()}

    @cached_property
    def passes(self) -> list[np.ndarray]:
        """Where in the flattened batch the tokens of each forward pass lie, of each cp rank by itself."""
        case, length, found = self.trial.case, self.trial.case.seq_len(self.step), []
        for rank, rows in self.rows.items():
            held = [positions(case, peer, length) for peer in self.trial.plan.peers(rank, "cp")]
            steps = [one for one in self.trial.ranks[rank].steps if one.step == self.step]
            sizes = [len(part.tokens) for one in steps for part in one.microbatches if part.tokens is not None]
            parts = [part for part in np.split(rows, np.cumsum(sizes)[:-1]) if len(part)]
            found += [(part[:, None] * length + at).ravel() for part in parts for at in held]
        return found

    @cached_property
    def observed(self) -> dict[int, float]:
        """The sum of the losses of each share."""
        found: dict[int, float] = {}
        for rank in self.rows:
            peers = self.trial.plan.peers(rank, "cp")
            last = [r for r in self.trial.last_stages() if self.trial.feeder(r) in peers]
            found[rank] = math.fsum(total for r in last for total, _ in losses(self.trial, r, self.step))
        return found if all(found.values()) else {}

    @cached_property
    def bench(self) -> Bench:
        return bench_of(self.trial, self.step)

    @cached_property
    def usual(self) -> dict[int, float]:
        return self._by_share(self.bench.losses())

    @property
    def as_usual(self) -> bool:
        """Whether the losses are those of the samples received: then the model computes what it should."""
        return all(self._close(self.usual[rank], seen) for rank, seen in self.observed.items())

    def _by_share(self, by_row: np.ndarray) -> dict[int, float]:
        return {rank: float(by_row[rows].sum()) for rank, rows in self.rows.items()}

    def _close(self, one: float, other: float) -> bool:
        return abs(one - other) <= 4 * self.trial.bounds.loss[self.step] * abs(other)

    def ranks(self, by_row: np.ndarray) -> list[int] | None:
        """The shares whose losses are these; None unless those of all others are the usual ones, and some differ."""
        tried = self._by_share(by_row)
        chosen = [rank for rank, seen in self.observed.items() if self._close(tried[rank], seen)]
        others = all(self._close(self.usual[rank], self.observed[rank]) for rank in self.rows if rank not in chosen)
        telling = [rank for rank in chosen if not self._close(self.usual[rank], self.observed[rank])]
        if not telling or not others:
            return None
        return chosen if len(chosen) == len(self.rows) else telling

    def single(self) -> Iterator[Found]:
        wrong = inputs_that_differ(self.trial)[1]
        for variation in self.variations(self._parts(wrong)):
            for modules in (one for one in self.modules(variation.part) if self._may_begin(one, wrong)):
                found = self.tried(variation, modules)
                if found is not None:
                    yield found

    def _parts(self, wrong: str) -> set[str]:
        """The kinds of modules that may be wrong where that is the first one into which something wrong goes."""
        if not wrong and self.step == 1 and first_wrong_input(self.trial):
            return {"model"}  # all inputs were seen, and are right
        ends = [end for end in BEFORE if wrong and self.step == 1 and (wrong == end or wrong.endswith(f".{end}"))]
        return {"model", *BEFORE[ends[0]]} if ends else {"model", *itertools.chain(*BEFORE.values())}

    def _may_begin(self, modules: list[str], wrong: str) -> bool:
        """Whether the first of these lies in the block into which something wrong goes first, or the one before. The whole
        model lies everywhere."""
        if not wrong or self.step > 1 or modules == [""]:
            return True
        return self._block(wrong) - self._block(modules[0]) in (0, 1)

    def _block(self, name: str) -> int:
        first, *rest = name.split(".")
        if first == "layers":
            return int(rest[0])
        return -1 if first == "tok_embeddings" else self.trial.case.model.n_layers

    def tried(self, variation: Variation, modules: list[str], numbers: int = 1) -> Found | None:
        from harness.reference.altered import altering

        by_row = self._losses(variation, modules)
        ranks = self.ranks(by_row)
        if ranks is None:
            return None
        rows = self._chosen(ranks)
        altered = altering(variation, modules, self.step, rows)
        if rows is None and not self._inputs_match(altered):  # of some rows, the model runs twice
            return None
        whole = math.fsum(self.observed.values())
        distance = abs(float(by_row.sum()) - whole) / whole if rows is None else 0.0
        cause = self.cause(variation, modules, ranks)
        return Found(cause, altered, variation.loss, distance, numbers + (rows is not None))

    def _losses(self, variation: Variation, modules: list[str]) -> np.ndarray:
        from harness.reference.altered import altering, unaltered

        altered = None if variation.alter is unaltered else altering(variation, modules, self.step)
        return self.bench.losses(altered, variation.loss)

    def _chosen(self, ranks: list[int]) -> np.ndarray | None:
        """The rows of these shares; None: all."""
        if len(ranks) == len(self.rows):
            return None
        rows = np.zeros(sum(map(len, self.rows.values())), bool)
        rows[np.concatenate([self.rows[rank] for rank in ranks])] = True
        return rows

    def _inputs_match(self, altered: Alter) -> bool:
        """What goes into each module in step 1, as far as it was seen."""
        return self.step > 1 or not inputs_that_differ(self.trial, self.bench.inputs(altered))[1]

    def cause(self, variation: Variation, modules: list[str], ranks: list[int]) -> Cause:
        every = modules in self.modules(variation.part)[:1]
        where = "" if every else f"in {some(modules, 3)}"
        if len(ranks) < len(self.rows):
            members = {r for r in self.trial.ranks if self.trial.feeder(r) in fed_with(self.trial.plan, ranks)}
            where += on_ranks(self.trial, members).removeprefix(" " * (not where))
        since = from_step(self.trial, self.step) * (self.step > self.trial.first_step)
        where = " ".join(filter(None, (where, since)))
        return Cause(variation.name, variation.observed, where, variation.expected)

    def variations(self, parts: set[str]) -> list[Variation]:
        return [variation for variation in self._variations if variation.part in parts]

    @cached_property
    def _variations(self) -> list[Variation]:
        from harness.reference import variations
        from harness.reference.masks import (
            dropout_of_other_steps,
            mask_of_first_row,
            mask_of_step,
            unmasked_embedding,
        )
        from harness.reference.rounding import low_sums

        case, tokens = self.trial.case, self.trial.reference.tokens
        degrees = {len(groups[0]) for groups in self.trial.plan.groups.values()}
        found = variations.variations(case.model, case.training, degrees)
        found += low_sums(case.training, self.passes)
        found += unmasked_embedding(case.dims.tp) if case.dims.tp > 1 else []
        if case.model.dropout:
            found += dropout_of_other_steps(case.training, self.trial.first_step)
        if case.training.document_mask:
            found.append(mask_of_first_row(self._first_rows()))
            for step in range(1, self.step):
                ids = self.trial.reference.samples[step - 1]
                at = [self.trial.reference.sample_ids.index(id_) for id_ in ids]
                found.append(mask_of_step(tokens[at, : case.seq_len(step)], step))
        if case.dims.cp > 1:
            found += variations.over_cp(*map(self._over_cp, dict.fromkeys(map(case.seq_len, case.steps))))
        return found

    def _first_rows(self) -> np.ndarray:
        """Of each row of the step's batch, the first one of the microbatch that it is computed in. int64 [rows]"""
        size, first = self.trial.case.local_batch, np.arange(sum(map(len, self.rows.values())))
        for rows in self.rows.values():
            first[rows] = rows[np.arange(len(rows)) // size * size]
        return first

    def _over_cp(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The positions that the ranks of a cp group hold, one after the other; and, by position, which rank."""
        held = [positions(self.trial.case, rank, length) for rank in self.trial.plan.peers(0, "cp")]
        owner = np.empty(length, int)
        for rank, at_rank in enumerate(held):
            owner[at_rank] = rank
        return np.concatenate(held), owner

    def modules(self, part: str) -> list[list[str]]:
        """All modules of this kind, those of stages of a pipeline, and each alone."""
        every = self._names[part]
        alone = [[name] for name in every] if 1 < len(every) <= 3 * WIDE else []
        blocks = [name for name in every if name.startswith("layers.")]
        layers = [[name for name in blocks if int(name.split(".")[1]) in layers] for layers in self._layers_of_stages]
        chosen = [names for names in (blocks, *layers) if 1 < len(names) < len(every)]
        return [every, *chosen, *alone]

    @cached_property
    def _layers_of_stages(self) -> list[range]:
        """Of a pipeline: those of each stage, and those from a stage on."""
        case = self.trial.case
        stages = [layers_of_stage(case, stage) for stage in range(case.n_stages if case.dims.pp > 1 else 0)]
        later = (range(of_stage.start, case.model.n_layers) for of_stage in stages[1:])
        return list(dict.fromkeys((*stages, *later)))

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        import torch

        from harness.reference.altered import KINDS, modules_of
        from harness.reference.model import Llama

        with torch.device("meta"):
            model = Llama(self.trial.case.model)
        return {part: modules_of(model, part) for part in (*KINDS, "block", "model")}

    def fitted(self) -> Iterator[Found]:
        from harness.reference.fitted import families

        if self.step > self.trial.first_step:
            return
        parts = self._parts(inputs_that_differ(self.trial)[1])
        for family in [one for one in families(self.trial.case.model) if one.of(1.0).part in parts]:
            for modules in self.modules(family.of(1.0).part):
                number = self._root(family.low, family.high, self._excess(family.of, modules))
                if number is not None and (found := self.tried(family.of(number), modules, numbers=2)) is not None:
                    yield found

    def _excess(self, of: Callable[[float], Variation], modules: list[str]) -> Callable[[float], float]:
        """By how much the loss is larger than observed, by the number."""

        def excess(number: float) -> float:
            return float(self._losses(of(number), modules).sum()) - math.fsum(self.observed.values())

        return excess

    def _root(self, low: float, high: float, excess: Callable[[float], float]) -> float | None:
        """Where the loss is the one observed, of as few digits as that takes; by false position in the logarithm."""
        points = np.geomspace(low, high, 6)
        values = [excess(x) for x in points]
        for (a, fa), (b, fb) in itertools.pairwise(zip(np.log(points), values, strict=True)):
            if fa * fb < 0:
                return self._few_digits(_false_position(a, fa, b, fb, lambda x: excess(math.exp(x))), excess)
        return None

    def _few_digits(self, number: float, excess: Callable[[float], float]) -> float:
        whole = math.fsum(self.observed.values())
        short = (float(f"{number:.{digits}g}") for digits in (1, 2, 3, 4, 6, 8))
        return next((x for x in short if self._close(whole + excess(x), whole)), number)

    def pairs(self) -> Iterator[Found]:
        """Of two variations, each of all its modules: the first one makes more modules' inputs right."""
        from harness.reference.altered import altering

        order, wrong = list(self.trial.reference.inputs), inputs_that_differ(self.trial)[1]
        for one in self.variations(self._parts(wrong)) if wrong and self.step == 1 else ():
            at = self.modules(one.part)[0]
            first = altering(one, at, self.step)
            then = inputs_that_differ(self.trial, self.bench.inputs(first))[1]
            if then and order.index(then) <= order.index(wrong):
                continue
            for two in self.variations(self._parts(then)):
                there = self.modules(two.part)[0]
                both, cause = _both(first, altering(two, there, self.step)), self.cause(two, there, list(self.rows))
                close = two.name != one.name and self.ranks(self.bench.losses(both, two.loss)) == list(self.rows)
                if close and self._inputs_match(both):
                    of_first = self.cause(one, at, list(self.rows))
                    joined = Cause(f"{of_first.kind}, {cause.kind}", f"{_phrase(of_first)}; {_phrase(cause)}")
                    yield Found(joined, both, two.loss, 0.0, 2)


def _phrase(cause: Cause) -> str:
    return f"{cause.observed} {cause.where}".strip() + f", requested {cause.expected}" * bool(cause.expected)


def _both(one: Alter, two: Alter) -> Alter:
    def alter(model: Any, step: int) -> None:
        one(model, step)
        two(model, step)

    return alter


def _false_position(a: float, fa: float, b: float, fb: float, value: Callable[[float], float]) -> float:
    """Illinois: the end that stays counts half. [a, b] in the logarithm of the number."""
    for _ in range(40):
        x = (a * fb - b * fa) / (fb - fa)
        fx = value(x)
        if fx == 0 or abs(b - a) < 1e-14 * abs(x):
            return math.exp(x)
        if fx * fb < 0:
            a, fa = b, fb
        else:
            fa /= 2
        b, fb = x, fx
    return math.exp(b)
