"""The layout that really ran, from the summaries of a recording's ranks: nothing in it is declared or guessed.

Groups over which the same is done, and of which the same is claimed, are one axis. It has a name only where a wrapper
or a DTensor names it: FSDP and tensor parallelism use the same collectives.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from harness.core.evidence.keys import ranks_from_key, ranks_key
from harness.core.evidence.summary import Summary
from harness.core.evidence.summary_parts import Issued, Use

H = TypeVar("H", bound=Hashable)


@dataclass(frozen=True)
class Moved:
    """The bytes that each rank of a group moved in one step, by one collective in one phase."""

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
    """Groups of one size over which the same is done, and of which the same is claimed."""

    size: int
    """Number of ranks of each group."""
    role: str
    """Claim of wrappers or DTensors; empty if nothing is claimed."""
    groups: tuple[str, ...]
    """Groups, in the words of ranks_key."""
    moved: tuple[Moved, ...]
    """What is moved over them."""


def observed_axes(summaries: Iterable[Summary]) -> tuple[Axis, ...]:
    """Return the axes of the layout, those with the largest groups first.

    Empty if no rank moved anything in its passes. Groups of one size and role that issue the same collectives are one
    axis. Stages of a pipeline differ in what they issue. So groups that share no rank are also one axis if one issues
    all that the other does.
    """
    uses: dict[str, list[Use]] = defaultdict(list)
    roles: dict[str, str] = {}
    for summary in summaries:
        for use in summary.traffic.uses:
            uses[use.ranks].append(use)
            roles.setdefault(use.ranks, summary.groups.roles.get(use.ranks, ""))
    groups_by_kind: dict[tuple[int, str, frozenset[tuple[str, str]]], list[str]] = defaultdict(list)
    for group, group_uses in uses.items():
        signature = frozenset((use.op, use.phase) for use in group_uses)
        groups_by_kind[len(ranks_from_key(group)), roles[group], signature].append(group)
    # Groups that issue most come first, so that a group that issues a part of it finds their axis.
    kinds = sorted(groups_by_kind.items(), key=lambda kind: -len(kind[0][2]))
    lines: list[_AxisInProgress] = []
    for (size, role, signature), groups in kinds:
        for group in sorted(groups, key=ranks_from_key):
            ranks = set(ranks_from_key(group))
            line = next((line for line in lines if line.accepts_group(size, role, signature, ranks)), None)
            if line is None:
                line = _AxisInProgress(size, role, signature)
                lines.append(line)
            line.groups.append(group)
            line.ranks |= ranks
    found_axes = [
        Axis(line.size, line.role, tuple(sorted(line.groups, key=ranks_from_key)), _traffic_over(line.groups, uses))
        for line in lines
    ]
    return tuple(sorted(found_axes, key=lambda axis: (-axis.size, axis.role == "", axis.groups)))


@dataclass
class _AxisInProgress:
    """An axis while its groups are collected."""

    size: int
    role: str
    signature: frozenset[tuple[str, str]]
    groups: list[str] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)

    def accepts_group(self, size: int, role: str, signature: frozenset[tuple[str, str]], ranks: set[int]) -> bool:
        """Return whether a group belongs to this axis: same size and role, no collective of its own, no rank twice."""
        is_same_kind = (size, role) == (self.size, self.role) and signature <= self.signature
        return is_same_kind and self.ranks.isdisjoint(ranks)


def _traffic_over(groups: Iterable[str], uses: Mapping[str, list[Use]]) -> tuple[Moved, ...]:
    """Return what the ranks of these groups moved, one record for each phase, collective and dtype."""
    uses_by_kind: dict[tuple[str, str, str], list[Use]] = defaultdict(list)
    for group in groups:
        for use in uses[group]:
            uses_by_kind[use.phase, use.op, use.dtype].append(use)
    moved = []
    for (phase, op, dtype), kind_uses in sorted(uses_by_kind.items()):
        calls = max(use.calls for use in kind_uses)
        sizes = [use.bytes for use in kind_uses]
        steps = _common_steps(use.steps for use in kind_uses)
        moved.append(Moved(op, phase, dtype, calls, min(sizes), max(sizes), steps))
    return tuple(moved)


def _common_steps(steps: Iterable[str]) -> str:
    """Return the steps in which every rank moved as much, in the words of ranks_key. Empty: in each step of a rank.

    A rank that ended early has fewer steps on record. If no step is common to all, the steps of any rank are returned.
    """
    step_sets = [frozenset(ranks_from_key(key)) for key in steps if key]
    if not step_sets:
        return ""
    common_steps = frozenset.intersection(*step_sets) or frozenset.union(*step_sets)
    return ranks_key(tuple(sorted(common_steps)))


# ---- what is the same on which ranks


def group_ranks_by(summaries: Iterable[Summary], value_of: Callable[[Summary], H | None]) -> dict[H, list[int]]:
    """Return the ranks by the value that `value_of` returns for them, None left out; the value of most ranks first."""
    return _ranks_by_value((summary.rank, value_of(summary)) for summary in summaries)


def _ranks_by_value(pairs: Iterable[tuple[int, H | None]]) -> dict[H, list[int]]:
    """Return, by value, the ranks that have it: the value of most ranks first, then that of the lowest rank.

    Ranks whose value is None are left out.
    """
    ranks_by_value: dict[H, list[int]] = defaultdict(list)
    for rank, value in pairs:
        if value is not None:
            ranks_by_value[value].append(rank)
    return dict(sorted(ranks_by_value.items(), key=lambda entry: (-len(entry[1]), entry[1])))


def families_of_replicas(summaries: Iterable[Summary]) -> list[list[Summary]]:
    """Return the families of two or more ranks that claim to hold the same slices of the same parameters.

    Ranks without claims are left out.
    """
    families: dict[tuple[int, int], list[Summary]] = defaultdict(list)
    for summary in summaries:
        if summary.parameters.slices:
            families[summary.parameters.model, summary.parameters.slices].append(summary)
    return [family for family in families.values() if len(family) > 1]


def copied_families(summaries: Iterable[Summary]) -> list[list[Summary]]:
    """Return, for each group, its ranks' summaries with the contents of parameters that are copied over it, not cut.

    Groups of which only one rank is on record are left out.
    """
    families: dict[str, list[Summary]] = defaultdict(list)
    for summary in summaries:
        for group, contents in summary.contents.copies.items():
            families[group].append(with_contents_by_step(summary, contents))
    return [family for family in families.values() if len(family) > 1]


def uncut_families(summaries: Iterable[Summary]) -> list[list[Summary]]:
    """Return, for each group, its ranks' summaries with the contents of parameters that they do not cut over it.

    Left out are groups of which only one rank is on record, and those whose contents were not equal before the first
    step.
    """
    families: dict[str, list[Summary]] = defaultdict(list)
    for summary in summaries:
        for group, contents in summary.contents.uncut.items():
            families[group].append(with_contents_by_step(summary, contents))
    return [family for family in families.values() if len(family) > 1 and _began_equal(family)]


def _began_equal(family: list[Summary]) -> bool:
    """Return whether all these ranks have the same digest before the first step. False if the first one has none."""
    if 0 not in family[0].contents.by_step:
        return False
    return len({summary.contents.by_step.get(0) for summary in family}) == 1


def with_contents_by_step(summary: Summary, by_step: dict[int, int]) -> Summary:
    """Return the summary with these digests by step as its contents, in place of those of all its parameters."""
    return replace(summary, contents=replace(summary.contents, by_step=by_step))


def differing_by_step(families: Iterable[list[Summary]]) -> dict[int, list[tuple[list[int], list[int]]]]:
    """Return, by step, each family that differs after it: (ranks with what most hold, all other ranks).

    Contents before the first step may be anything and are not compared, nor is a rank without the step. Steps in which
    all families agree are left out.
    """
    pairs_by_step: dict[int, list[tuple[list[int], list[int]]]] = defaultdict(list)
    for family in families:
        steps = set[int]().union(*(summary.contents.by_step for summary in family)) - {0}
        for step in sorted(steps):
            if pair := split_by_majority({summary.rank: summary.contents.by_step.get(step) for summary in family}):
                pairs_by_step[step].append(pair)
    return dict(sorted(pairs_by_step.items()))


def split_by_majority(keys: Mapping[int, Hashable | None]) -> tuple[list[int], list[int]] | None:
    """Return the ranks that have the most frequent key, and all ranks with another one. None if all keys are equal.

    keys: by rank, bytes or a digest. A rank whose key is None is in neither list. Of two equally frequent keys, that of
    the lowest rank counts as the most frequent.
    """
    majority, *minorities = _ranks_by_value(keys.items()).values() or [[]]
    if not minorities:
        return None
    return majority, sorted(itertools.chain.from_iterable(minorities))


def groups_out_of_order(summaries: Iterable[Summary]) -> list[tuple[str, tuple[int, ...]]]:
    """Return (group's name, its ranks) of groups whose members did not issue the same collectives in one order.

    A recorded member that issued nothing over the group counts as different. Collectives are compared up to the last
    step for which all members had inputs.
    """
    issued_by_group: dict[tuple[str, str], dict[int, Issued]] = defaultdict(dict)
    joined: dict[int, int | None] = {}
    for summary in summaries:
        joined[summary.rank] = summary.progress.joined
        for issued in summary.groups.issued:
            issued_by_group[issued.group, issued.ranks][summary.rank] = issued
    differing_groups = []
    for (group, key), issued_by_rank in issued_by_group.items():
        recorded_ranks = {rank for rank in ranks_from_key(key) if rank in joined}
        last_step = min((step for rank in recorded_ranks if (step := joined[rank]) is not None), default=None)
        digests = {rank: _digest_until(issued, last_step) for rank, issued in issued_by_rank.items()}
        if len(set(digests.values())) > 1 or set(digests) != recorded_ranks:
            differing_groups.append((group, ranks_from_key(key)))
    return differing_groups


def _digest_until(issued: Issued, last_step: int | None) -> object:
    """Return a key that is equal for equal collectives up to this step, or in all steps if it is None."""
    if last_step is None:
        return issued.digest
    return tuple((step, digest) for step, digest in issued.steps.items() if step <= last_step)


@dataclass(frozen=True)
class DifferingRanks:
    """Ranks that share a value of something, other than that of most ranks."""

    what: str
    """Name of what was compared: a switch, "torch's version", "optimizer", "steps"."""
    ranks: tuple[int, ...]
    """Global ranks that have the other value."""
    theirs: str
    """Their value."""
    most: str
    """Value that most ranks have."""


def find_differing_ranks(summaries: Iterable[Summary]) -> list[DifferingRanks]:
    """Return, for each switch, version, optimizer and number of steps, the ranks whose value is not that of most ranks.

    Only values are compared that every layout has equal, so neither models nor groups of parameters. A rank without a
    value is not compared. Steps are compared among ranks that ended well, unless ranks ran out of inputs. Empty if all
    are equal.
    """
    summaries = list(summaries)
    odd: list[DifferingRanks] = []
    uneven_inputs = any(summary.progress.joined is not None for summary in summaries)
    switches = sorted(set[str]().union(*(summary.environment.settings for summary in summaries)) - {"threads"})

    def optimizer_classes(summary: Summary) -> str | None:
        return ", ".join(sorted({text.partition("(")[0] for text in summary.modules.optimizers})) or None

    def steps_on_record(summary: Summary) -> str | None:
        return str(summary.progress.steps_seen) if summary.progress.ended == "ok" and not uneven_inputs else None

    comparisons: list[tuple[str, Callable[[Summary], str | None]]] = [
        *((name, functools.partial(_in_environment, "settings", name)) for name in switches),
        *((f"{name}'s version", functools.partial(_in_environment, "versions", name)) for name in ("torch", "python")),
        ("optimizer", optimizer_classes),
        ("steps", steps_on_record),
    ]
    for quantity, read in comparisons:
        ranks_by_value = group_ranks_by(summaries, read)
        majority, *minorities = ranks_by_value.items() if ranks_by_value else [("", [])]
        odd += [DifferingRanks(quantity, tuple(ranks), value, majority[0]) for value, ranks in minorities]
    return odd


def _in_environment(table: str, name: str, summary: Summary) -> str | None:
    """Return an entry of the summary's settings or versions. None if the rank has no such entry."""
    return getattr(summary.environment, table).get(name)


def costly_switches(summaries: Iterable[Summary]) -> dict[str, int]:
    """Return, by switch that costs time, the number of ranks on which it was on.

    Switches that no rank had on are left out.
    """
    costly_values = {
        "autograd anomaly detection": "on",
        "CUDA_LAUNCH_BLOCKING": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "torch.distributed debug level": "DETAIL",
        "TORCH_NCCL_NAN_CHECK": "1",
    }
    ranks_by_switch: Counter[str] = Counter()
    for summary in summaries:
        for name, costly_value in costly_values.items():
            if costly_value in summary.environment.settings.get(name, "").split(" and "):
                ranks_by_switch[name] += 1
    return dict(ranks_by_switch)
