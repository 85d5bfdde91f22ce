"""What bisecting found, as a person reads it: the commit, what it broke, and what was seen before and after it."""

from __future__ import annotations

from pathlib import Path

from harness.bisect import Found, Judged
from harness.line import load_trial
from harness.plan import slice_text
from harness.trial import Trial, bytes_text, ranks_text


def bisect_report(found: Found) -> str:
    judged = [one for one in found.judged if one.verdict != "skip"]
    skipped = [one for one in found.judged if one.verdict == "skip"]
    lines = [
        *_who(found),
        "",
        f"  {len(judged)} {found.what}s judged, {len(skipped)} skipped, in {found.seconds:.0f} s",
    ]
    lines += [line for one in skipped for line in (f"  skipped  {one.name}", f"           {one.problem}")]
    return "\n".join(lines)


def _who(found: Found) -> list[str]:
    if found.first_bad is None or found.last_good is None:
        lines = [f"the first bad {found.what} is one of these; those between the last good and it could not be judged"]
        return lines + [f"  {name}" for name in found.candidates]
    bad, good = found.first_bad, found.last_good
    laws = sorted(bad.broken - good.broken)
    lines = [f"first bad {found.what:<8}{bad.name}"]
    for case in dict.fromkeys(case for case, _ in laws):
        lines.append(f"  breaks          {', '.join(law for name, law in laws if name == case)} of {case}")
    lines += [f"  diagnosis       {bad.cause}", f"  last good       {good.name}", ""]
    return lines + _side_by_side(good, bad, laws[0][0])


def _side_by_side(good: Judged, bad: Judged, case: str) -> list[str]:
    before, after = (facts(load_trial(one.folders[case])) for one in (good, bad))
    rows = [("", good.label, bad.label)]
    rows += [(name, before.get(name, "none"), after.get(name, "none")) for name in dict.fromkeys([*before, *after])]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [
        f"  {name:<{first}}  {one:<{second}}  {'' if one == two or not name else '! '}{two}".rstrip()
        for name, one, two in rows
    ]
    return [*lines, f"  evidence: {_shown(good, case)} and {_shown(bad, case)}"]


def _shown(one: Judged, case: str) -> Path:
    return one.folders[case]


def facts(trial: Trial) -> dict[str, str]:
    """Of rank 0: what it holds, over whom it moved what in its first step; and what a test of less would look at."""
    evidence = trial.ranks[0]
    step = evidence.steps[0]
    told = {"process groups of rank 0": " ".join(sorted({ranks_text(g.ranks) for g in evidence.groups}))}
    root = next(iter(evidence.structure.values()), {})
    for axis in ("shard", "replicate"):
        if f"{axis}_ranks" in root:
            told[f"it {axis}s over"] = ranks_text(tuple(root[f"{axis}_ranks"]))
    first = evidence.parameters[0]
    part = trial.holdings[0][first.fqn]
    told[f"its {first.fqn}"] = slice_text(part, first.global_shape) if part else "found nowhere"
    moved: dict[str, int] = {}
    for call in evidence.collectives:
        if call.step == step.step and call.phase in ("forward", "backward"):
            key = f"{call.phase} {call.op} over {ranks_text(call.ranks)}"
            moved[key] = moved.get(key, 0) + call.bytes
    told |= {key: bytes_text(count) for key, count in sorted(moved.items())}
    told["parameters kept"] = bytes_text(step.memory.get("parameters", 0))
    told["losses displayed"] = " ".join(
        f"{s.reported_loss:.12g}" for s in evidence.steps if s.reported_loss is not None
    )
    return told
