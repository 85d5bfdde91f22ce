"""Page on a recording: anomalies first, then what really ran. At most 40 lines of 100 columns."""

from __future__ import annotations

import itertools
import re
import shlex
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from harness.core.evidence.keys import ranks_from_key, ranks_key, steps_text
from harness.core.evidence.summary import Summary
from harness.core.evidence.text import MAX_LISTED_RANKS, bytes_text, count_text, ranks_text, some_ranks_text
from harness.core.judge.local_training import averaging_steps, local_training_means
from harness.core.judge.observed import (
    Axis,
    Moved,
    costly_switches,
    families_of_replicas,
    group_ranks_by,
    observed_axes,
)
from harness.core.report.text import WIDTH, Rows, wrap_text
from harness.recording.judged.anomalies import NO_CHECK_OF_A_LAYOUT, find_anomalies
from harness.recording.judged.outside_passes import PHASES as WORDS_OF_PHASES
from harness.recording.judged.outside_passes import Line, outside_lines, whole_steps
from harness.recording.judged.stored_recording import Recording
from harness.recording.pages.recording_jobs import job_rows
from harness.recording.pages.recording_own import own_rows

# ---- The rows of a recording's page on what moved outside of forward and backward, or beside the thread that trains


LABEL = "outside passes"
MOST_KINDS = 4


def outside_rows(summaries: Sequence[Summary], groups_text: Callable[[Sequence[str]], str]) -> list[tuple[str, str]]:
    """Return rows on what moved outside of forward and backward, or a row that nothing did: forgotten clipping shows in
    that.

    Empty for one rank, without a whole step, or if nothing is known to have moved and some rank was not fully recorded.
    groups_text: words for groups.
    """
    steps = whole_steps(summaries)
    if not steps or len(summaries) == 1:
        return []
    texts = [
        f"{_operator_text(line.op, line.dtype)}{WORDS_OF_PHASES.get(line.phase, '')} over {groups_text(line.groups)}:"
        f" {_line_amount_text(line)}"
        for line in outside_lines(summaries, axes_apart=True)
    ]
    if not texts and any(
        summary.groups.own or summary.recorder.failed or not summary.saw_a_step for summary in summaries
    ):
        return []
    no_collective = f"no collective ran outside of forward and backward, in {steps_text(steps)}"
    return [(LABEL if number == 0 else "", text) for number, text in enumerate(texts or [no_collective])]


def background_rows(summaries: Sequence[Summary], groups_text: Callable[[Sequence[str]], str]) -> list[tuple[str, str]]:
    """Return rows on what other threads issue, such as a checkpoint that is written while training goes on.

    Empty if nothing. At most MOST_KINDS kinds of collectives.
    """
    groups: dict[tuple[str, str, int, int], set[str]] = {}
    for summary in summaries:
        for use in summary.traffic.background:
            groups.setdefault((use.op, use.dtype, use.calls, use.bytes), set()).add(use.ranks)
    texts = []
    for (op, dtype, calls, size), group_keys in sorted(groups.items()):
        amount = f"{bytes_text(size)} in {count_text(calls, 'call')}"
        texts.append(
            f"{_operator_text(op, dtype)} over {groups_text(sorted(group_keys, key=ranks_from_key))}: {amount}"
        )
    shown = texts[:MOST_KINDS]
    if len(texts) > MOST_KINDS:
        shown.append(f".. and {len(texts) - MOST_KINDS} more kinds")
    return [("other threads" if number == 0 else "", text) for number, text in enumerate(shown)]


def _operator_text(op: str, dtype: str) -> str:
    """Return the operator, with its dtype. A barrier's payload is torch's own, so its dtype is left out."""
    return op if op == "barrier" else f"{op} of {dtype}"


def _line_amount_text(line: Line) -> str:
    """Return the bytes and calls of a collective in a step; by steps where they differ."""
    steps_by_text: dict[str, list[int]] = {}
    for step in line.calls:
        steps_by_text.setdefault(_step_amount_text(line, step), []).append(step)
    if len(steps_by_text) == 1 < len(line.calls):
        return f"{next(iter(steps_by_text))} a step"
    return "; ".join(f"{text} in {steps_text(tuple(steps))}" for text, steps in steps_by_text.items())


def _step_amount_text(line: Line, step: int) -> str:
    """Return the bytes and calls of a collective in one step: "1.051 MB in 3 calls", "3 calls" if no bytes, "none"
    if no calls."""
    fewest_calls, most_calls = line.calls[step]
    least_bytes, most_bytes = line.bytes[step]
    if not most_calls:
        return "none"
    count = str(fewest_calls) if fewest_calls == most_calls else f"{fewest_calls} to {most_calls}"
    calls = f"{count} call{'s' if most_calls > 1 else ''}"
    if not most_bytes:
        return calls
    size = bytes_text(most_bytes)
    if least_bytes != most_bytes:
        size = f"{bytes_text(least_bytes)} to {size}"
    return f"{size} in {calls}"


# ---- the page


MOST_LINES = 40
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


def recording_text(recording: Recording, judged: Sequence[str] = (), *, layout: str = "", whole: bool = False) -> str:
    """Return the page of a recording, in at most MOST_LINES lines unless `whole` is set.

    judged: the report of checks on a declared layout, empty for none. It goes first; anomalies that no check sees
    follow its first line. layout: as it was typed.
    """
    summaries = [summary for _, summary in sorted(recording.summaries.items())]
    jobs = job_rows(recording)
    rows = [*anomaly_rows(recording), *jobs]
    if summaries:
        rows += fact_rows(recording, summaries, with_layout=bool(judged or layout))
    lines = [_title_text(recording), *wrapped_table(rows)]
    if judged:
        worst = [row for row in rows if row[0] in NO_CHECK_OF_A_LAYOUT]
        below = [row for row in rows if row not in worst]
        lines = [judged[0], *wrapped_table(worst), *judged[1:], "", _title_text(recording), *wrapped_table(below)]
    return "\n".join(lines if whole else _cut_lines(lines, recording, layout))


def anomalies_text(recording: Recording) -> str:
    """Return the page's title, and below it what is anomalous."""
    return "\n".join([_title_text(recording), *wrapped_table(anomaly_rows(recording))])


def anomaly_rows(recording: Recording) -> Rows:
    """Return a row for each anomaly: its kind, and text. Empty if nothing is anomalous."""
    return [(anomaly.label, anomaly.text) for anomaly in find_anomalies(recording)]


def _title_text(recording: Recording) -> str:
    """Return the page's title: the folder, how many ranks left evidence, and the exit code unless it is 0 or unknown."""
    evidence_text = f"{len(recording.summaries)} of {recording.world or 'an unknown number of'} ranks left evidence"
    job_text = f"job 1 of {1 + len(recording.others)}: " if recording.others else ""
    return f"{recording.directory}: {job_text}{evidence_text}{_exit_text(recording.code)}"


def _exit_text(code: int | None) -> str:
    """Return the command's exit as the end of a sentence; empty if the exit code is 0 or unknown."""
    if not code:
        return ""
    return f", exit code {code}" if code > 0 else f", ended by {signal.Signals(-code).name}"


def _cut_lines(lines: list[str], recording: Recording, layout: str) -> list[str]:
    """Return the lines; of a page that is too long the first ones, and the command that shows all.

    Anomalies come first, so facts are cut from below.
    """
    if len(lines) <= MOST_LINES:
        return lines
    options = ["--layout", layout] if layout else []
    rest_command = shlex.join(["harness", "report", "--all", *options, str(recording.directory)])
    return [*lines[: MOST_LINES - 1], f"  .. and {len(lines) - MOST_LINES + 1} more lines: {rest_command}"]


# ---- what ran


def fact_rows(recording: Recording, summaries: Sequence[Summary], *, with_layout: bool = False) -> Rows:
    """Return the rows on what ran: command, model, traffic, parameters, inputs, memory, costs, and what is not judged.

    Precondition: there is a summary. with_layout: whether a layout was declared. Without a step that is shown, a row
    says why.
    """
    has_step = any(summary.shown for summary in summaries)
    rows: Rows = [
        ("command", _command_text(recording.command or " ".join(summaries[0].environment.argv))),
        ("model", _model_text(summaries)),
    ]
    rows += rows_of_step(summaries) if has_step else [("steps", _no_steps_text(summaries))]
    rows += [
        ("parameters", _placements_text(summaries)),
        ("contents", _contents_text(summaries)),
        *_received_rows(summaries),
    ]
    if has_step:
        rows.append(("memory", _memory_text(summaries)))
    rows += cost_rows(summaries)
    rows.append(("recorder", _recorder_time_text(summaries)))
    rows.append(("not judged", _not_judged_text(recording, with_layout) + _uncompared_buffers_text(summaries)))
    return rows


def rows_of_step(summaries: Sequence[Summary]) -> Rows:
    """Return the rows on what moved in the step that is shown: inside passes, over own groups, outside of passes;
    idle groups."""
    inside = [*(rows_of_axes(summaries) or _no_axes_rows(summaries)), *own_rows(summaries)]
    outside = (*outside_rows(summaries, groups_text), *background_rows(summaries, groups_text))
    return [*inside, *outside, *_idle_rows(summaries)]


def _no_steps_text(summaries: Sequence[Summary]) -> str:
    """Return why no step is shown, with a hint at optimizers if all ranks ended well and ended no step."""
    no_step = "none was recorded from its beginning to its end"
    if all(not summary.progress.steps_seen and summary.progress.ended == "ok" for summary in summaries):
        no_step += "; a step ends where an optimizer that derives from torch.optim.Optimizer has stepped"
    return no_step


def _command_text(command: str, longest: int = 150) -> str:
    """Return the command with paths shortened to file names behind ".../", and cut to `longest` characters."""
    text = re.sub(r"(^|(?<= ))/\S*/(?=\S)", ".../", command)
    return text if len(text) <= longest else f"{text[:longest]} .."


def _model_text(summaries: Sequence[Summary]) -> str:
    """Return the row on model, optimizers and steps: of the most frequent kind of ranks, and how many kinds there are."""
    kinds = group_ranks_by(
        summaries, lambda summary: (summary.modules.classes, summary.parameters.count, summary.parameters.elements)
    )
    (parts, count, elements), ranks = next(iter(kinds.items()))
    where_text = (
        f" on {some_ranks_text(ranks)}, others elsewhere ({len(kinds)} kinds of ranks)" if len(kinds) > 1 else ""
    )
    left_out_text = f"; not recorded: {summaries[0].recorder.left_out[0]}" if summaries[0].recorder.left_out else ""
    ranks_by_steps = group_ranks_by(summaries, lambda summary: summary.progress.steps_seen)
    most_steps = max(ranks_by_steps)
    furthest_ranks = f" on {some_ranks_text(ranks_by_steps[most_steps])}" if len(ranks_by_steps) > 1 else ""
    stepped = next((summary.modules.optimizers for summary in summaries if summary.modules.optimizers), ())
    unstepped = f"; {summaries[0].modules.unstepped} in no optimizer" if summaries[0].modules.unstepped else ""
    fsdp1_text = " in a rank's own part, for FSDP1 cuts them" if "fsdp1" in summaries[0].modules.wrappers else ""
    return (
        f"{' + '.join(parts)}: {count} parameters of {elements:,} elements{fsdp1_text}{unstepped}{where_text}; "
        f"{', '.join(stepped) or 'no step of an optimizer recorded'}; {count_text(most_steps, 'step')}{furthest_ranks}; "
        f"torch {summaries[0].environment.versions.get('torch', '?')}{left_out_text}"
    )


def rows_of_axes(summaries: Sequence[Summary]) -> Rows:
    """Return what moved in forward and backward over groups of several ranks."""
    return list(_axis_rows(observed_axes(summaries)))


def _axis_rows(observed_axes: Sequence[Axis]) -> Iterator[tuple[str, str]]:
    """Yield the rows of each axis: its role and groups, then at most six of the collectives that moved over them."""
    for axis in observed_axes:
        yield f"over {axis.size} ranks", f"{_role_text(axis)}{groups_text(axis.groups)}"
        for moved in sorted(axis.moved, key=lambda moved: PHASES.index(moved.phase))[:6]:
            yield "", f"  {_moved_text(moved)}"


def _no_axes_rows(summaries: Sequence[Summary]) -> Rows:
    """Return a row that no collective ran in forward or backward. Empty for one rank, or where that is not known.

    Ranks train alone where nothing ran at all: a pipeline's own loop sends between passes.
    """
    if len(summaries) == 1 or any(
        summary.groups.own or summary.recorder.failed or not summary.saw_a_step for summary in summaries
    ):
        return []
    elsewhere = any(
        summary.traffic.outside or summary.traffic.background or summary.groups.issued for summary in summaries
    )
    alone = " of the step that is shown" if elsewhere else ": each rank trains alone"
    return [("groups", f"no collective ran in forward or backward{alone}")]


def _role_text(axis: Axis) -> str:
    """Name an axis's role, unless only operators show it."""
    return f"{ROLES[axis.role]}: " if axis.role in ROLES else ""


def _moved_text(moved: Moved) -> str:
    """Return the bytes, dtype and calls of one collective in one phase, and in which steps it moved so much."""
    size = bytes_text(moved.most)
    size = size if moved.least == moved.most else f"{bytes_text(moved.least)} to {size}"
    calls = "once" if moved.calls == 1 else f"in {moved.calls} calls"
    return f"{moved.op} in {moved.phase}: {size} {moved.dtype} {_steps_phrase(moved.steps)}, {calls}"


def _steps_phrase(steps: str) -> str:
    return f"in {steps_text(ranks_from_key(steps))}" if steps else "a step"


def _idle_rows(summaries: Sequence[Summary]) -> Rows:
    """Return a row on groups over which nothing ran. Empty if there is none, or if some rank recorded no step."""
    if not all(summary.saw_a_step for summary in summaries):
        return []
    idle = sorted(set(itertools.chain.from_iterable(summary.groups.idle for summary in summaries)), key=ranks_from_key)
    return [("idle groups", f"nothing ran over {groups_text(idle)}")] if idle else []


def _placements_text(summaries: Sequence[Summary]) -> str:
    """Return how the parameters of the first rank are placed, the four most frequent placements, and its wrappers."""
    total: Counter[str] = Counter()
    for text, count in summaries[0].parameters.placements.items():
        total[text] += count
    wrappers = ", ".join(f"{count} x {kind}" for kind, count in summaries[0].modules.wrappers.items())
    lies = "; ".join(f"{count} {'plain tensors' if text == 'plain' else text}" for text, count in total.most_common(4))
    return lies + (f"; wrappers {wrappers}" if wrappers else "")


def _contents_text(summaries: Sequence[Summary]) -> str:
    """Return which ranks hold equal bytes of the parameters after the last common step, and how many different parts
    there are.

    It ends with replicas as claimed, or why none are. "not examined" if no contents are on record.
    """
    steps = [set(summary.contents.by_step) for summary in summaries if summary.contents.by_step]
    if not steps:
        return "not examined"
    last = max(set.intersection(*steps) or set().union(*steps))
    kinds = group_ranks_by(summaries, lambda summary: (summary.parameters.model, summary.contents.by_step.get(last)))
    families = families_of_replicas(summaries)
    when = f"after step {last}" if last else "before the first step"
    several = [ranks_key(tuple(ranks)) for ranks in kinds.values() if len(ranks) > 1]
    equal = f", equal on {groups_text(several)}" if several else ""
    if families and (local_method := local_training_means(families[0])):
        again = averaging_steps(families[0])
        again_text = f", the same again after {steps_text(again)}" if again else ""
        when += f" (local by {local_method}{again_text})"
    if families:
        claimed = f"; replicas as claimed: {count_text(len(families), 'set')} of {len(families[0])}"
    else:
        claimed = f"; {_no_replicas_text(summaries)}"
    parts = f"{count_text(len(kinds), 'different part')} of the parameters {when}"
    return parts + equal + claimed + _ignored_text(summaries, last)


def _ignored_text(summaries: Sequence[Summary], step: int) -> str:
    """Return how many parameters the contents leave out, because DDP was configured to ignore them. Empty if none."""
    contents_by_fqn: dict[str, set[int | None]] = {}
    for summary in summaries:
        for fqn, contents in summary.contents.ignored.items():
            contents_by_fqn.setdefault(fqn, set()).add(contents.get(step))
    if not contents_by_fqn:
        return ""
    differing = sum(len(values) > 1 for values in contents_by_fqn.values())
    parameters = count_text(len(contents_by_fqn), "parameter")
    return f"; without {parameters} that DDP ignores: {differing} differ between ranks"


def _no_replicas_text(summaries: Sequence[Summary]) -> str:
    """Return why no replicas are claimed, in words.

    Tensor parallelism replicates some parameters of ranks that hold other parts of the rest. FSDP1 says over which
    ranks it replicates, and not which parts its vectors are.
    """
    roles = itertools.chain.from_iterable(summary.groups.roles.values() for summary in summaries)
    if any(role.startswith("replicated") for role in roles):
        return "which parts these are is not claimed"
    placements = itertools.chain.from_iterable(summary.parameters.placements for summary in summaries)
    has_replicated = any("Replicate" in text for text in placements)
    return "no two ranks claim the same parts of all of them" if has_replicated else "none claimed to be replicas"


def _received_rows(summaries: Sequence[Summary]) -> Rows:
    """Return a row on how many different inputs the ranks received in the first step on record.

    Empty if none is on record.
    """
    steps = sorted(set(itertools.chain.from_iterable(summary.received.batches for summary in summaries)))
    if not steps:
        return []
    kinds = group_ranks_by(summaries, lambda summary: summary.received.batches.get(steps[0]))
    several = [ranks_key(tuple(sorted(ranks))) for ranks in kinds.values() if len(ranks) > 1]
    same_text = f"; the same to {groups_text(several)}" if several else ""
    inputs_text = count_text(len(kinds), "different input")
    recording_ranks = [summary.rank for summary in summaries if steps[0] in summary.received.batches]
    only_text = (
        f", as far as {some_ranks_text(recording_ranks)} recorded" if len(recording_ranks) < len(summaries) else ""
    )
    return [("fed in step 1" if steps[0] == 1 else f"fed in step {steps[0]}", inputs_text + same_text + only_text)]


def _memory_text(summaries: Sequence[Summary]) -> str:
    """Return the bytes of parameters, gradients, optimizer state and peak on a rank, with the range over ranks.

    Kinds that were not measured are left out. A step that an optimizer began and did not end has what was measured
    before.
    """
    words = {"parameters": "parameters", "gradients": "gradients", "optimizer_state": "optimizer state"}
    parts = []
    for kind, word in words.items():
        if sizes := [summary.resources.memory[kind] for summary in summaries if kind in summary.resources.memory]:
            parts.append(f"{word} {_bytes_range_text(sizes)}")
    bytes_after_forward = [summary.resources.after_forward for summary in summaries if summary.shown]
    parts.append(f"parameters as forward ends {_bytes_range_text(bytes_after_forward)}")
    peaks = [summary.resources.peak for summary in summaries if summary.resources.peak]
    return ", ".join(parts) + (f"; peak {_bytes_range_text(peaks)}" if peaks else "")


def _bytes_range_text(sizes: Sequence[int]) -> str:
    """Return the sizes with a unit: one if all are equal, else the least and the largest.

    Precondition: there is one.
    """
    smallest = min(sizes)
    largest = max(sizes)
    return bytes_text(largest) if smallest == largest else f"{bytes_text(smallest)} to {bytes_text(largest)}"


def cost_rows(summaries: Sequence[Summary]) -> Rows:
    """Return rows on what takes time, and may well be meant: barriers, gradients reduced again, costly switches.

    Empty if none.
    """
    rows: Rows = []
    waiting = [summary.rank for summary in summaries if summary.traffic.waits]
    if waiting:
        rows.append(("barriers", f"inside forward and backward, on {some_ranks_text(waiting)}"))
    rows += _repeated_reduction_rows(summaries)
    ranks_by_setting = costly_switches(summaries)
    if ranks_by_setting:
        rows.append(("switched on", ", ".join(f"{name} ({count} ranks)" for name, count in ranks_by_setting.items())))
    return rows


def _repeated_reduction_rows(summaries: Sequence[Summary]) -> Rows:
    """Return a row for each axis over which DDP reduces gradients several times a step; empty if there is none.

    DDP looks at no_sync as its forward pass ends: around backward alone it spares nothing.
    """
    gradients = max((summary.resources.memory.get("gradients", 0) for summary in summaries), default=0)
    if not gradients:
        return []
    rows = []
    for axis in observed_axes(summaries):
        sums = [
            moved_in_axis
            for moved_in_axis in axis.moved
            if (moved_in_axis.op, moved_in_axis.phase) == ("all_reduce", "backward")
            and "int" not in moved_in_axis.dtype
        ]
        moved_bytes = sum(moved_in_axis.most for moved_in_axis in sums)
        calls = sum(moved_in_axis.calls for moved_in_axis in sums)
        if axis.role == "replicated by ddp" and moved_bytes >= 2 * gradients and moved_bytes % gradients == 0:
            text = (
                f"{bytes_text(moved_bytes)} for {bytes_text(gradients)} of gradients in {calls} calls: DDP reduces them"
            )
            rows.append(
                ("reduced again", f"{text} {moved_bytes // gradients} times a step, as without no_sync around forward")
            )
    return rows


def _not_judged_text(recording: Recording, with_layout: bool) -> str:
    """Return what is not judged, and which command or option judges it.

    The command is one if another recording was named (--same-as) when this one was made.
    """
    if not recording.same_as:
        return NOT_JUDGED + NEED + ("" if with_layout else NO_LAYOUT)
    after = ["--after", str(recording.after)] if recording.after else []
    compare = shlex.join(["harness", "compare", "--numbers", *after, recording.same_as, str(recording.directory)])
    return f"{NOT_JUDGED}are judged by `{compare}`" + ("" if with_layout else NO_LAYOUT)


def _uncompared_buffers_text(summaries: Sequence[Summary]) -> str:
    """Return how many buffers no check compares, as the end of a sentence; empty if there are none.

    Each rank may rightly have other averages, since batch norm's come from the rank's samples.
    """
    most_buffers = max(summary.modules.buffers for summary in summaries)
    are = (
        "buffers of floating-point numbers, such as averages, are"
        if most_buffers > 1
        else "buffer of floating-point numbers is"
    )
    return f"; {most_buffers} {are} compared by no check" if most_buffers else ""


def _recorder_time_text(summaries: Sequence[Summary]) -> str:
    """Return the most seconds that the recorder took on a rank, and how long the shown step took without it, where known."""
    shown_step = summaries[0].shown
    seconds_by_rank = [
        summary.resources.seconds[shown_step] for summary in summaries if summary.resources.seconds.get(shown_step)
    ]
    step = f"; step {shown_step} took {max(seconds_by_rank):.3g} s without it" if seconds_by_rank else ""
    return f"{max(summary.recorder.seconds for summary in summaries):.2f} s of a rank's time in all{step}"


# ---- words


def groups_text(keys: Sequence[str], shown_groups: int = 4) -> str:
    """Return the ranks of the first groups, and how many groups there are: [0-7] [8-15] .. (16 groups)"""
    text = " ".join(_group_text(key) for key in keys[:shown_groups])
    return text + (f" .. ({len(keys)} groups)" if len(keys) > shown_groups else "")


def _group_text(key: str) -> str:
    """Return a group's ranks in brackets; of many, their stride, or the first two, the last and their number."""
    ranks = ranks_from_key(key)
    if len(ranks) > 6 and ":" in key:
        return f"[{key.replace(':', ' by ')}]"
    text = ranks_text(ranks)
    return text if text.count(",") < MAX_LISTED_RANKS else f"[{ranks[0]},{ranks[1]},..,{ranks[-1]}; {len(ranks)} ranks]"


def wrapped_table(rows: Rows) -> list[str]:
    """Return the rows as lines, each text wrapped behind its label. A text that begins with two spaces is indented."""
    lines: list[str] = []
    for label, text in rows:
        indent = "  " if text.startswith("  ") else ""
        filled = list(
            itertools.chain.from_iterable(wrap_text(line, " " * 18 + indent) for line in text.strip().splitlines())
        )
        first, *rest = filled or [""]
        lines += [f"  {label:<15} {first.removeprefix(' ' * 18)}"[:WIDTH], *rest]
    return lines
