"""What really ran, from the summaries of a recording's ranks: pure, with nothing declared and nothing guessed.

Groups over which the same is done, and of which the same is claimed, are one axis. It has a name only where a wrapper or a
DTensor names it: FSDP and tensor parallelism use the same collectives.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from harness.core.evidence.keys import ranks_key, ranks_of
from harness.core.evidence.summary import Issued, Summary, Use

H = TypeVar("H", bound=Hashable)


@dataclass(frozen=True)
class Moved:
    """What each rank of a group moved in one step, by one collective in one phase."""

    op: str
    """Name of the collective."""
    phase: str
    """Phase of the step."""
    dtype: str
    """Dtype of the elements."""
    calls: int
    """Most calls of a rank."""
    least: int
    """Fewest bytes of a rank."""
    most: int
    """Most bytes of a rank."""
    steps: str = ""
    """Steps, as of a Use, in which every rank moved as much."""


@dataclass(frozen=True)
class Axis:
    """Groups over which the same is done, and of which the same is claimed."""

    size: int
    """Number of ranks of each group."""
    role: str
    """Claim of wrappers or DTensors; empty if nothing is claimed."""
    groups: tuple[str, ...]
    """Groups, in the words of ranks_key."""
    moved: tuple[Moved, ...]
    """What is moved over them."""


def axes(summaries: Iterable[Summary]) -> tuple[Axis, ...]:
    """The largest groups first. Stages of a pipeline differ in what they do. So groups of one size and role that share no rank
    are one axis if some do all that others do."""
    uses: dict[str, list[Use]] = defaultdict(list)
    roles: dict[str, str] = {}
    for summary in summaries:
        for use in summary.uses:
            uses[use.ranks].append(use)
            roles.setdefault(use.ranks, summary.roles.get(use.ranks, ""))
    alike: dict[tuple[int, str, frozenset[tuple[str, str]]], list[str]] = defaultdict(list)
    for key, done in uses.items():
        signature = frozenset((use.op, use.phase) for use in done)
        alike[len(ranks_of(key)), roles[key], signature].append(key)
    lines: list[_Line] = []
    for (size, role, signature), groups in sorted(alike.items(), key=lambda kind: -len(kind[0][2])):
        for group in sorted(groups, key=ranks_of):
            ranks = set(ranks_of(group))
            home = next((line for line in lines if line.takes(size, role, signature, ranks)), None)
            if home is None:
                home = _Line(size, role, signature)
                lines.append(home)
            home.groups.append(group)
            home.ranks |= ranks
    found = [
        Axis(line.size, line.role, tuple(sorted(line.groups, key=ranks_of)), _moved(line.groups, uses))
        for line in lines
    ]
    return tuple(sorted(found, key=lambda axis: (-axis.size, axis.role == "", axis.groups)))


@dataclass
class _Line:
    """An axis as it is found."""

    size: int
    role: str
    signature: frozenset[tuple[str, str]]
    groups: list[str] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)

    def takes(self, size: int, role: str, signature: frozenset[tuple[str, str]], ranks: set[int]) -> bool:
        same = (size, role) == (self.size, self.role) and signature <= self.signature
        return same and self.ranks.isdisjoint(ranks)


def _moved(groups: Iterable[str], uses: Mapping[str, list[Use]]) -> tuple[Moved, ...]:
    by: dict[tuple[str, str, str], list[Use]] = defaultdict(list)
    for use in (use for group in groups for use in uses[group]):
        by[use.phase, use.op, use.dtype].append(use)
    found = []
    for (phase, op, dtype), us in sorted(by.items()):
        calls, sizes, steps = zip(*((u.calls, u.bytes, u.steps) for u in us), strict=True)
        found.append(Moved(op, phase, dtype, max(calls), min(sizes), max(sizes), _of_all(steps)))
    return tuple(found)


def _of_all(steps: Iterable[str]) -> str:
    """In which steps as much moved on every rank: one that ended early knows fewer. Empty stands for each step of a rank."""
    told = [frozenset(ranks_of(one)) for one in steps if one]
    return ranks_key(tuple(sorted(frozenset.intersection(*told) or frozenset.union(*told)))) if told else ""


# ---- what is the same on which ranks


def together(summaries: Iterable[Summary], what: Callable[[Summary], H | None]) -> dict[H, list[int]]:
    """The ranks by what they have, None left out; the most first."""
    return _grouped((summary.rank, what(summary)) for summary in summaries)


def _grouped(pairs: Iterable[tuple[int, H | None]]) -> dict[H, list[int]]:
    found: dict[H, list[int]] = defaultdict(list)
    for rank, thing in pairs:
        if thing is not None:
            found[thing].append(rank)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[1])))


def replicas(summaries: Iterable[Summary]) -> list[list[Summary]]:
    """Ranks that claim to hold the same parts of the same parameters, where there are several."""
    found: dict[tuple[int, int], list[Summary]] = defaultdict(list)
    for summary in summaries:
        if summary.slices:
            found[summary.model, summary.slices].append(summary)
    return [family for family in found.values() if len(family) > 1]


def copied(summaries: Iterable[Summary]) -> list[list[Summary]]:
    """Return, by group, its ranks with the contents of parameters that are copied over it, while others are cut."""
    found: dict[str, list[Summary]] = defaultdict(list)
    for summary in summaries:
        for group, contents in summary.copies.items():
            found[group].append(replace(summary, contents=contents))
    return [family for family in found.values() if len(family) > 1]


def uncut(summaries: Iterable[Summary]) -> list[list[Summary]]:
    """Return, by group, its ranks with the contents of parameters that they do not cut over it, if they began alike."""
    families: dict[str, list[Summary]] = defaultdict(list)
    for summary in summaries:
        for group, contents in summary.uncut.items():
            families[group].append(replace(summary, contents=contents))
    return [
        family
        for family in families.values()
        if len(family) > 1 and 0 in family[0].contents and len({one.contents.get(0) for one in family}) == 1
    ]


def differing(families: Iterable[list[Summary]]) -> dict[int, list[tuple[list[int], list[int]]]]:
    """Return, by step, ranks that should hold the same: those that hold what most hold, and those that hold something else.
    What is there before the first step may be anything."""
    found: dict[int, list[tuple[list[int], list[int]]]] = defaultdict(list)
    for family in families:
        for step in sorted({step for one in family for step in one.contents if step}):
            if pair := most_and_others({one.rank: one.contents.get(step) for one in family}):
                found[step].append(pair)
    return dict(sorted(found.items()))


def most_and_others(keys: Mapping[int, Hashable | None]) -> tuple[list[int], list[int]] | None:
    """Return the ranks whose contents have the most frequent key, and those with another one; None where all are alike.

    keys: by rank, what is equal where contents are: bytes, or a digest. A rank without one, None, is not compared.
    """
    most, *others = _grouped(keys.items()).values() or [[]]
    return (most, sorted(itertools.chain.from_iterable(others))) if others else None


def out_of_order(summaries: Iterable[Summary]) -> list[tuple[str, tuple[int, ...]]]:
    """(group, its ranks) whose members did not issue the same collectives in the same order, as long as all of them had
    inputs."""
    found: dict[tuple[str, str], dict[int, Issued]] = defaultdict(dict)
    joined: dict[int, int | None] = {}
    for summary in summaries:
        joined[summary.rank] = summary.joined
        for one in summary.issued:
            found[one.group, one.ranks][summary.rank] = one
    wrong = []
    for (group, key), issued in found.items():
        present = {rank for rank in ranks_of(key) if rank in joined}
        last = min((step for rank in present if (step := joined[rank]) is not None), default=None)
        digests = {rank: _until(one, last) for rank, one in issued.items()}
        if len(set(digests.values())) > 1 or set(digests) != present:
            wrong.append((group, ranks_of(key)))
    return wrong


def _until(one: Issued, last: int | None) -> object:
    """What was issued until this step; all where there is none."""
    return one.digest if last is None else tuple((step, it) for step, it in one.steps.items() if step <= last)


@dataclass(frozen=True)
class Odd:
    """Ranks that have something other than most."""

    what: str
    """Name of it."""
    ranks: tuple[int, ...]
    """Global ranks that have something other."""
    theirs: str
    """What they have."""
    most: str
    """What most ranks have."""


def odd_ranks(summaries: Iterable[Summary]) -> list[Odd]:
    """Things that no layout makes different: switches, versions, classes of optimizers. Stages of a pipeline may well have
    other models, and other groups of parameters."""
    summaries = list(summaries)
    found: list[Odd] = []
    uneven = any(one.joined is not None for one in summaries)
    switches = sorted({name for one in summaries for name in one.settings} - {"threads"})
    told: list[tuple[str, Callable[[Summary], str | None]]] = [
        *((name, functools.partial(_of, "settings", name)) for name in switches),
        *((f"{name}'s version", functools.partial(_of, "versions", name)) for name in ("torch", "python")),
        ("optimizer", lambda one: ", ".join(sorted({text.partition("(")[0] for text in one.optimizers})) or None),
        ("steps", lambda one: str(one.steps_seen) if one.ended == "ok" and not uneven else None),
    ]
    for what, read in told:
        kinds = together(summaries, read)
        most, *others = kinds.items() if kinds else [("", [])]
        found += [Odd(what, tuple(ranks), theirs, most[0]) for theirs, ranks in others]
    return found


def _of(table: str, name: str, one: Summary) -> str | None:
    return getattr(one, table).get(name)


def left_on(summaries: Iterable[Summary]) -> dict[str, int]:
    """Switches that cost time, and on how many ranks they were on."""
    costly = {"autograd anomaly detection": "on", "CUDA_LAUNCH_BLOCKING": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    costly |= {"torch.distributed debug level": "DETAIL", "TORCH_NCCL_NAN_CHECK": "1"}
    found = Counter(
        name for one in summaries for name, on in costly.items() if on in one.settings.get(name, "").split(" and ")
    )
    return dict(found)
