"""A recording on one page: anomalies first, then what really ran. At most 40 lines of 80 columns."""

from __future__ import annotations

import itertools
import re
import shlex
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from harness.core.evidence.keys import ranks_key, ranks_of, steps_text
from harness.core.evidence.summary import Summary
from harness.core.evidence.text import MANY, bytes_text, counted, ranks_text, some_ranks
from harness.core.judge.local_training import averaged, local_by
from harness.core.judge.observed import Axis, Moved, axes, left_on, replicas, together
from harness.core.report.text import WIDTH, Rows, wrapped
from harness.recording.judged.anomalies import NO_CHECK_OF_A_LAYOUT, anomalies
from harness.recording.judged.outside_passes import PHASES as WORDS_OF_PHASES
from harness.recording.judged.outside_passes import Line, lines, whole_steps
from harness.recording.judged.stored_recording import Recording
from harness.recording.pages.recording_jobs import job_rows
from harness.recording.pages.recording_own import own_rows

# ---- The rows of a recording's page on what moved outside of forward and backward, or beside the thread that trains


LABEL = "outside passes"
MOST = 4


def outside_rows(summaries: Sequence[Summary], groups_text: Callable[[Sequence[str]], str]) -> list[tuple[str, str]]:
    """Where there is nothing that is said too: clipping that was forgotten looks like that."""
    steps = whole_steps(summaries)
    if not steps or len(summaries) == 1:
        return []
    found = [
        f"{_what(line.op, line.dtype)}{WORDS_OF_PHASES.get(line.phase, '')} over {groups_text(line.groups)}: {_amount(line)}"
        for line in lines(summaries, axes_apart=True)
    ]
    if not found and any(one.own_groups or one.failed or not one.saw_a_step for one in summaries):
        return []
    none = f"no collective ran outside of forward and backward, in {steps_text(steps)}"
    return [(LABEL if number == 0 else "", text) for number, text in enumerate(found or [none])]


def background_rows(summaries: Sequence[Summary], groups_text: Callable[[Sequence[str]], str]) -> list[tuple[str, str]]:
    """Rows on what other threads issue, such as a checkpoint that is written while training goes on."""
    groups: dict[tuple[str, str, int, int], set[str]] = {}
    for use in (use for one in summaries for use in one.background):
        groups.setdefault((use.op, use.dtype, use.calls, use.bytes), set()).add(use.ranks)
    found = []
    for (op, dtype, calls, size), over in sorted(groups.items()):
        amount = f"{bytes_text(size)} in {counted(calls, 'call')}"
        found.append(f"{_what(op, dtype)} over {groups_text(sorted(over, key=ranks_of))}: {amount}")
    shown = [*found[:MOST], *[f".. and {len(found) - MOST} more kinds"] * (len(found) > MOST)]
    return [("other threads" if number == 0 else "", text) for number, text in enumerate(shown)]


def _what(op: str, dtype: str) -> str:
    """A barrier's payload is torch's own."""
    return op if op == "barrier" else f"{op} of {dtype}"


def _amount(line: Line) -> str:
    alike: dict[str, list[int]] = {}
    for step in line.calls:
        alike.setdefault(_once(line, step), []).append(step)
    if len(alike) == 1 < len(line.calls):
        return f"{next(iter(alike))} a step"
    return "; ".join(f"{text} in {steps_text(tuple(at))}" for text, at in alike.items())


def _once(line: Line, step: int) -> str:
    (few, many), (least, most) = line.calls[step], line.bytes[step]
    if not many:
        return "none"
    size = bytes_text(most) if least == most else f"{bytes_text(least)} to {bytes_text(most)}"
    calls = f"{few if few == many else f'{few} to {many}'} call{'s' * (many > 1)}"
    return f"{size} in {calls}" if most else calls


# ---- the page


LINES = 40
ROLES = {
    "sharded by fsdp2": "FSDP2 shards parameters",
    "sharded by fsdp1": "FSDP1 shards parameters",
    "replicated by fsdp2": "HSDP replicates parameters",
    "replicated by fsdp1": "HSDP replicates parameters",
    "replicated by fsdp2 alone": "FSDP2 replicates parameters",
    "replicated by fsdp1 alone": "FSDP1 replicates parameters",
    "replicated by ddp": "DDP replicates parameters",
    "replicated by replicate": "replicate() replicates parameters",
    "cut": "DTensors are cut",
    "copied": "DTensors are copied",
}
NOT_JUDGED = "loss needs an adapter (`harness init`); gradients and update "
NEED = "need one, or a recording of the same training (--same-as)"
NO_LAYOUT = "; what groups are for, --layout"
PHASES = ("forward", "pipeline", "backward")


def page(recording: Recording, judged: Sequence[str] = (), *, layout: str = "", whole: bool = False) -> str:
    """judged: what checks say of a layout that was declared; the rest is said without one. layout: as it was typed."""
    summaries = [one for _, one in sorted(recording.summaries.items())]
    jobs = job_rows(recording)
    rows = (
        [*anomaly_rows(recording), *jobs, *facts(recording, summaries, with_layout=bool(judged or layout))]
        if summaries
        else [*anomaly_rows(recording), *jobs]
    )
    lines = [_title(recording), *table_of(rows)]
    if judged:
        worst = [row for row in rows if row[0] in NO_CHECK_OF_A_LAYOUT]
        below = [row for row in rows if row not in worst]
        lines = [judged[0], *table_of(worst), *judged[1:], "", _title(recording), *table_of(below)]
    return "\n".join(lines if whole else _cut(lines, recording, layout))


def anomalies_text(recording: Recording) -> str:
    """Return the page's title, and below it what is anomalous."""
    return "\n".join([_title(recording), *table_of(anomaly_rows(recording))])


def anomaly_rows(recording: Recording) -> Rows:
    """Return what is anomalous: kind and text."""
    return [(anomaly.label, anomaly.text) for anomaly in anomalies(recording)]


def _title(recording: Recording) -> str:
    left = f"{len(recording.summaries)} of {recording.world or '?'} ranks left evidence"
    several = f"job 1 of {1 + len(recording.others)}: " if recording.others else ""
    return f"{recording.directory}: {several}{left}{_exit(recording.code)}"


def _exit(code: int | None) -> str:
    """Name the command's exit, unless it is 0 or unknown."""
    if not code:
        return ""
    return f", exit code {code}" if code > 0 else f", ended by {signal.Signals(-code).name}"


def _cut(lines: list[str], recording: Recording, layout: str) -> list[str]:
    """Anomalies come first, and facts are cut from below."""
    if len(lines) <= LINES:
        return lines
    options = ["--layout", layout] if layout else []
    rest = shlex.join(["harness", "report", "--all", *options, str(recording.directory)])
    return [*lines[: LINES - 1], f"  .. and {len(lines) - LINES + 1} more lines: {rest}"]


# ---- what ran


def facts(recording: Recording, summaries: Sequence[Summary], *, with_layout: bool = False) -> Rows:
    stepped = any(one.shown for one in summaries)
    return [
        ("command", _command(recording.command or " ".join(summaries[0].argv))),
        ("model", _model(summaries)),
        *(rows_of_step(summaries) if stepped else [("steps", _no_steps(summaries))]),
        ("parameters", _placements(summaries)),
        ("contents", _contents(summaries)),
        *_fed(summaries),
        *([("memory", _memory(summaries))] if stepped else []),
        *costs(summaries),
        ("recorder", _own(summaries)),
        ("not judged", _not_judged(recording, with_layout) + _not_compared(summaries)),
    ]


def rows_of_step(summaries: Sequence[Summary]) -> Rows:
    """What moved in the step that is shown."""
    inside = [*(rows_of_axes(summaries) or _no_axes(summaries)), *own_rows(summaries)]
    outside = (*outside_rows(summaries, groups_text), *background_rows(summaries, groups_text))
    return [*inside, *outside, *_idle(summaries)]


def _no_steps(summaries: Sequence[Summary]) -> str:
    none = "none was recorded from its beginning to its end"
    needs = "; a step ends where an optimizer that derives from torch.optim.Optimizer has stepped"
    return none + needs * all(not one.steps_seen and one.ended == "ok" for one in summaries)


def _command(command: str, most: int = 150) -> str:
    """Shorten files to their names, behind "...", and a long command to its beginning."""
    text = re.sub(r"(^|(?<= ))/\S*/(?=\S)", ".../", command)
    return text if len(text) <= most else f"{text[:most]} .."


def _model(summaries: Sequence[Summary]) -> str:
    kinds = together(summaries, lambda one: (one.parts, one.parameters, one.elements))
    (parts, count, elements), ranks = next(iter(kinds.items()))
    where = f" on {some_ranks(ranks)}, others elsewhere ({len(kinds)} kinds of ranks)" if len(kinds) > 1 else ""
    left = f"; not recorded: {summaries[0].left_out[0]}" if summaries[0].left_out else ""
    seen = together(summaries, lambda one: one.steps_seen)
    most = max(seen)
    furthest = f" on {some_ranks(seen[most])}" if len(seen) > 1 else ""
    stepped = next((one.optimizers for one in summaries if one.optimizers), ())
    unstepped = f"; {summaries[0].unstepped} in no optimizer" if summaries[0].unstepped else ""
    whose = " in a rank's own part, for FSDP1 cuts them" if "fsdp1" in summaries[0].wrappers else ""
    return (
        f"{' + '.join(parts)}: {count} parameters of {elements:,} elements{whose}{unstepped}{where}; "
        f"{', '.join(stepped) or 'no step of an optimizer recorded'}; {most} step{'s' * (most != 1)}{furthest}; "
        f"torch {summaries[0].versions.get('torch', '?')}{left}"
    )


def rows_of_axes(summaries: Sequence[Summary]) -> Rows:
    """Return what moved in forward and backward over groups of several ranks."""
    return list(_axes(axes(summaries)))


def _axes(found: Sequence[Axis]) -> Iterator[tuple[str, str]]:
    for axis in found:
        yield f"over {axis.size} ranks", f"{_role(axis)}{groups_text(axis.groups)}"
        for moved in sorted(axis.moved, key=lambda moved: PHASES.index(moved.phase))[:6]:
            yield "", f"  {_moved(moved)}"


def _no_axes(summaries: Sequence[Summary]) -> Rows:
    """Ranks train alone where nothing ran at all: a pipeline's own loop sends between passes."""
    if len(summaries) == 1 or any(one.own_groups or one.failed or not one.saw_a_step for one in summaries):
        return []
    elsewhere = any(one.outside or one.background or one.issued for one in summaries)
    alone = " of the step that is shown" if elsewhere else ": each rank trains alone"
    return [("groups", f"no collective ran in forward or backward{alone}")]


def _role(axis: Axis) -> str:
    """Name an axis's role, unless only operators show it."""
    return f"{ROLES[axis.role]}: " if axis.role in ROLES else ""


def _moved(moved: Moved) -> str:
    size = bytes_text(moved.most)
    size = size if moved.least == moved.most else f"{bytes_text(moved.least)} to {size}"
    calls = "once" if moved.calls == 1 else f"in {moved.calls} calls"
    return f"{moved.op} in {moved.phase}: {size} {moved.dtype} {_when(moved.steps)}, {calls}"


def _when(steps: str) -> str:
    return f"in {steps_text(ranks_of(steps))}" if steps else "a step"


def _idle(summaries: Sequence[Summary]) -> Rows:
    if not all(one.saw_a_step for one in summaries):
        return []
    idle = sorted({key for one in summaries for key in one.idle}, key=ranks_of)
    return [("idle groups", f"nothing ran over {groups_text(idle)}")] if idle else []


def _placements(summaries: Sequence[Summary]) -> str:
    total: Counter[str] = Counter()
    for text, count in summaries[0].placements.items():
        total[text] += count
    wrappers = ", ".join(f"{count} x {kind}" for kind, count in summaries[0].wrappers.items())
    lies = "; ".join(f"{count} {'plain tensors' if text == 'plain' else text}" for text, count in total.most_common(4))
    return lies + (f"; wrappers {wrappers}" if wrappers else "")


def _contents(summaries: Sequence[Summary]) -> str:
    """What is equal by its bytes. Where nothing is claimed, equal bytes are called that and no more."""
    steps = [set(one.contents) for one in summaries if one.contents]
    if not steps:
        return "not examined"
    last = max(set.intersection(*steps) or set().union(*steps))
    kinds = together(summaries, lambda one: (one.model, one.contents.get(last)))
    families = replicas(summaries)
    when = f"after step {last}" if last else "before the first step"
    several = [ranks_key(tuple(ranks)) for ranks in kinds.values() if len(ranks) > 1]
    equal = f", equal on {groups_text(several)}" if several else ""
    if families and (how := local_by(families[0])):
        again = averaged(families[0])
        when += f" (local by {how}" + (f", the same again after {steps_text(again)})" if again else ")")
    claimed = (
        f"; replicas as claimed: {len(families)} set{'s' * (len(families) != 1)} of {len(families[0])}"
        if families
        else f"; {_no_replicas(summaries)}"
    )
    parts = f"{len(kinds)} different part{'s' * (len(kinds) != 1)} of the parameters {when}"
    return parts + equal + claimed + _ignored(summaries, last)


def _ignored(summaries: Sequence[Summary], step: int) -> str:
    """Say which parameters the contents leave out, because DDP was configured to ignore them."""
    held: dict[str, set[int | None]] = {}
    for one in summaries:
        for fqn, contents in one.ignored.items():
            held.setdefault(fqn, set()).add(contents.get(step))
    if not held:
        return ""
    apart = sum(len(values) > 1 for values in held.values())
    many = f"{len(held)} parameter{'s' * (len(held) != 1)}"
    return f"; without {many} that DDP ignores: {apart} differ between ranks"


def _no_replicas(summaries: Sequence[Summary]) -> str:
    """Tensor parallelism replicates some parameters of ranks that hold other parts of the rest. FSDP1 says over which ranks it
    replicates, and not which parts its vectors are."""
    if any(role.startswith("replicated") for one in summaries for role in one.roles.values()):
        return "which parts these are is not claimed"
    some = any("Replicate" in text for one in summaries for text in one.placements)
    return "no two ranks claim the same parts of all of them" if some else "none claimed to be replicas"


def _fed(summaries: Sequence[Summary]) -> Rows:
    steps = sorted({step for one in summaries for step in one.fed})
    if not steps:
        return []
    kinds = together(summaries, lambda one: one.fed.get(steps[0]))
    several = [ranks_key(tuple(sorted(ranks))) for ranks in kinds.values() if len(ranks) > 1]
    same = f"; the same to {groups_text(several)}" if several else ""
    many = f"{len(kinds)} different input{'s' * (len(kinds) != 1)}"
    seen = [one.rank for one in summaries if steps[0] in one.fed]
    only = f", as far as {some_ranks(seen)} recorded" if len(seen) < len(summaries) else ""
    return [("fed in step 1" if steps[0] == 1 else f"fed in step {steps[0]}", many + same + only)]


def _memory(summaries: Sequence[Summary]) -> str:
    """Memory by kind; a step that an optimizer began and did not end has what was measured before."""
    words = {"parameters": "parameters", "gradients": "gradients", "optimizer_state": "optimizer state"}
    held = {word: [one.memory[kind] for one in summaries if kind in one.memory] for kind, word in words.items()}
    parts = [f"{word} {_range(sizes)}" for word, sizes in held.items() if sizes]
    parts += [f"parameters as forward ends {_range([one.kept for one in summaries if one.shown])}"]
    peaks = [one.peak for one in summaries if one.peak]
    return ", ".join(parts) + (f"; peak {_range(peaks)}" if peaks else "")


def _range(sizes: Sequence[int]) -> str:
    least, most = min(sizes), max(sizes)
    return bytes_text(most) if least == most else f"{bytes_text(least)} to {bytes_text(most)}"


def costs(summaries: Sequence[Summary]) -> Rows:
    """What takes time, and may well be meant."""
    rows: Rows = []
    waiting = [one.rank for one in summaries if one.waits]
    if waiting:
        rows.append(("barriers", f"inside forward and backward, on {some_ranks(waiting)}"))
    rows += _reduced_again(summaries)
    on = left_on(summaries)
    if on:
        rows.append(("switched on", ", ".join(f"{name} ({count} ranks)" for name, count in on.items())))
    return rows


def _reduced_again(summaries: Sequence[Summary]) -> Rows:
    """DDP looks at no_sync as its forward pass ends: around backward alone it spares nothing."""
    gradients = max((one.memory.get("gradients", 0) for one in summaries), default=0)
    rows = []
    for axis in axes(summaries) if gradients else ():
        sums = [
            one for one in axis.moved if (one.op, one.phase) == ("all_reduce", "backward") and "int" not in one.dtype
        ]
        moved, calls = sum(one.most for one in sums), sum(one.calls for one in sums)
        if axis.role == "replicated by ddp" and moved >= 2 * gradients and moved % gradients == 0:
            text = f"{bytes_text(moved)} for {bytes_text(gradients)} of gradients in {calls} calls: DDP reduces them"
            rows.append(
                ("reduced again", f"{text} {moved // gradients} times a step, as without no_sync around forward")
            )
    return rows


def _not_judged(recording: Recording, with_layout: bool) -> str:
    """Say what judges the rest; only what was not named when the command was recorded."""
    if not recording.same_as:
        return NOT_JUDGED + NEED + ("" if with_layout else NO_LAYOUT)
    after = ["--after", str(recording.after)] if recording.after else []
    compare = shlex.join(["harness", "compare", "--numbers", *after, recording.same_as, str(recording.directory)])
    return f"{NOT_JUDGED}are judged by `{compare}`" + ("" if with_layout else NO_LAYOUT)


def _not_compared(summaries: Sequence[Summary]) -> str:
    """Each rank may rightly have other averages, since batch norm's come from the rank's samples."""
    most = max(one.buffers for one in summaries)
    are = (
        "buffers of floating-point numbers, such as averages, are"
        if most > 1
        else "buffer of floating-point numbers is"
    )
    return f"; {most} {are} compared by no check" if most else ""


def _own(summaries: Sequence[Summary]) -> str:
    shown = summaries[0].shown
    took = [one.seconds[shown] for one in summaries if one.seconds.get(shown)]
    step = f"; step {shown} took {max(took):.3g} s without it" if took else ""
    return f"{max(one.own for one in summaries):.2f} s of a rank's time in all{step}"


# ---- words


def groups_text(keys: Sequence[str], most: int = 4) -> str:
    """[0-7] [8-15] .. (16 groups)"""
    shown = " ".join(_group_text(key) for key in keys[:most])
    return shown + (f" .. ({len(keys)} groups)" if len(keys) > most else "")


def _group_text(key: str) -> str:
    """A few ranks are listed; of many, every how manieth, or how many."""
    ranks = ranks_of(key)
    if len(ranks) > 6 and ":" in key:
        return f"[{key.replace(':', ' by ')}]"
    text = ranks_text(ranks)
    return text if text.count(",") < MANY else f"[{ranks[0]},{ranks[1]},..,{ranks[-1]}; {len(ranks)} ranks]"


def table_of(rows: Rows) -> list[str]:
    lines: list[str] = []
    for label, text in rows:
        within = "  " if text.startswith("  ") else ""
        filled = list(
            itertools.chain.from_iterable(wrapped(part, " " * 18 + within) for part in text.strip().splitlines())
        )
        first, *rest = filled or [""]
        lines += [f"  {label:<15} {first.removeprefix(' ' * 18)}"[:WIDTH], *rest]
    return lines
