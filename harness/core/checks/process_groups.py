"""Every rank is a member of the group that the plan gives it on each axis, and all its members agree.

This only lists groups. Whether a group that exists is used is judged by `traffic` and `placements`.
"""

from __future__ import annotations

from typing import Any

from harness.core.evidence.text import ranks_text
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, not_applicable, verdict_of
from harness.core.judge.trial import Trial
from harness.core.plan.grid import PIPELINE_ENDS

STAGE = "structure"
NEEDS = frozenset({"structure", "groups", "members"})


def check(trial: Trial) -> Result:
    """Search the planned group of each axis among each rank's groups. NOT APPLICABLE for one rank.

    Whether members agree on a group's name is judged only if all groups were listed at one moment.
    """
    if trial.plan.dims.world_size == 1:
        return not_applicable("process_groups", "one rank has no groups")
    findings: list[Finding] = []
    examined = 0
    for rank, evidence in sorted(trial.ranks.items()):
        existing_groups = {group.ranks for group in evidence.groups}
        for axis in _axes_in_use(trial):
            wanted = trial.plan.group_of(rank, axis)
            if len(wanted) == 1:
                continue
            examined += 1
            if wanted not in existing_groups:
                same_size = [ranks_text(ranks) for ranks in sorted(existing_groups) if len(ranks) == len(wanted)]
                note = ""
                if same_size:
                    note = f"groups of that size: {' '.join(same_size)}"
                subject: dict[str, Any] = {"kind": "group", "axis": axis, "group": wanted, "note": note}
                findings.append(Finding.at(rank, "a group of these ranks", None, **subject))
    if "moment" in trial.provided:
        findings += _disagreement_findings(trial)
    return verdict_of("process_groups", findings, examined)


def _axes_in_use(trial: Trial) -> list[str]:
    """Return the plan's axes that need a group of their own.

    Left out are dp_shard or dp_replicate where it is folded with cp, and the ends of a pipeline if they only send to
    each other.
    """
    plan = trial.plan
    unused = {axis.removesuffix("_cp") for axis in (plan.shard_axis, plan.replicate_axis) if axis.endswith("_cp")}
    unused |= {PIPELINE_ENDS} if trial.traits.tied_reduces_by == "send" else set()
    return [axis for axis in plan.groups if axis not in unused]


def _disagreement_findings(trial: Trial) -> list[Finding]:
    """Return a finding for each group of a rank that another member does not have with this name and these ranks."""
    findings = []
    for rank, evidence in sorted(trial.ranks.items()):
        for group in evidence.groups:
            for peer in group.ranks:
                if peer != rank and peer in trial.ranks and group not in trial.ranks[peer].groups:
                    subject: dict[str, Any] = {"kind": "group", "name": group.name, "group": group.ranks}
                    expected = f"the same group on rank {peer}"
                    findings.append(
                        Finding(ranks=tuple(sorted((rank, peer))), expected=expected, observed=None, **subject)
                    )
    return findings
