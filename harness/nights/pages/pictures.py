"""Pictures of a case: who holds what, over which ranks tensors moved, how the losses compare.

There is one PNG a judged case: the plan on the left, what was observed on the right, losses and their differences below.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from harness.core.evidence.own_folders import is_drawing, refuse_foreign_file
from harness.core.evidence.store import EvidenceError
from harness.core.evidence.text import bytes_text, ranks_text
from harness.core.judge import tolerance
from harness.core.judge.judgement import Judgement
from harness.core.judge.losses import global_loss
from harness.core.judge.measures import representative_step
from harness.core.judge.stored_trial import load_trial
from harness.core.judge.trial import Trial
from harness.core.plan.slices import Slice, numel
from harness.core.report.shown import AS_REQUESTED, UsedGroup, interval_text, rank_label, shown_parameter, used_groups
from harness.core.report.text import headline

PICTURE = "picture.png"
COLORS = [plt.get_cmap("tab20")(index) for index in range(20)]


def draw_judged(judgement: Judgement) -> Path:
    """Write picture.png beside the evidence of a judged case, and return its path.

    Raises EvidenceError if a rank left no evidence, or if another file of that name is there.
    """
    folder = judgement.folder
    trial = load_trial(folder)
    missing = [rank for rank in range(trial.run.world_size) if rank not in trial.ranks]
    if missing:
        raise EvidenceError(f"{folder}: ranks {ranks_text(missing)} left no evidence; see {folder / 'report.txt'}")
    refuse_foreign_file(folder / PICTURE, is_drawing)
    draw_trial(trial, folder / PICTURE, headline(judgement))
    return folder / PICTURE


def draw_trial(trial: Trial, path: Path, title: str) -> None:
    """Write the PNG of a trial to `path`: slices as requested and as observed, groups, losses.

    All ranks must have left evidence.
    """
    height = min(max(9.0, 0.22 * len(trial.ranks)), 60.0)  # inches: no name of a rank covers another up to 272 ranks
    figure = plt.figure(figsize=(13, height), layout="constrained")
    figure.suptitle(title, fontsize=12, wrap=True)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.2, 1))
    fqn = shown_parameter(trial)
    planned = {rank: slices[fqn] for rank in trial.ranks if fqn in (slices := trial.plan.slices[rank])}
    _draw_slices(figure.add_subplot(grid[0, 0]), trial, fqn, planned, f"requested: {fqn}, by rank")
    observed = {
        rank: trial.local_slices[rank].get(fqn)
        for rank in trial.ranks
        if rank in planned or fqn in trial.local_slices[rank]
    }
    _draw_slices(figure.add_subplot(grid[0, 1]), trial, fqn, observed, f"observed: bytes of {fqn}, by rank")
    _draw_groups(figure.add_subplot(grid[1, 0]), trial)
    _draw_losses(figure.add_subplot(grid[1, 1]), trial)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_slices(axes: Any, trial: Trial, fqn: str, slice_by_rank: Mapping[int, Slice | None], title: str) -> None:
    """Draw one row a rank: the whole parameter as a grey strip, and the rank's slice along dim 0 in a colour of that slice.

    A rank whose slice is None gets a red remark. Equal slices have equal colours.
    """
    size = trial.plan.shapes[fqn][0]
    distinct_slices = sorted(
        {local_slice for local_slice in slice_by_rank.values() if local_slice is not None and numel(local_slice)}
    )
    for rank, local_slice in slice_by_rank.items():
        axes.barh(rank, size, color="0.93", height=0.8)
        if local_slice is None:
            axes.text(
                size / 2, rank, "not a slice of the seed weight", ha="center", va="center", fontsize=7, color="red"
            )
        elif numel(local_slice):
            start, stop = local_slice[0]
            color = COLORS[distinct_slices.index(local_slice) % len(COLORS)]
            axes.barh(rank, stop - start, left=start, color=color, height=0.8, edgecolor="0.3", linewidth=0.5)
            axes.text(size, rank, f" {interval_text(local_slice, trial.plan.shapes[fqn])}", va="center", fontsize=6)
    axes.set(title=title, xlabel="dim 0", ylabel="rank", xlim=(0, size))
    axes.set_yticks(list(slice_by_rank), [rank_label(trial, rank) for rank in slice_by_rank], fontsize=7)
    axes.invert_yaxis()


def _draw_groups(axes: Any, trial: Trial) -> None:
    """Draw one row a group of the plan, and one for others over which tensors moved. Dots are its ranks."""
    groups = used_groups(trial)
    for row, group in enumerate(groups):
        color = "tab:green" if group.comparison_text == AS_REQUESTED else "tab:red" if group.moved else "0.7"
        axes.plot(group.ranks, [row] * len(group.ranks), "o-", color=color, markersize=5)
    axes.set_yticks(range(len(groups)), list(map(group_label, groups)), fontsize=7 if len(groups) < 16 else 5)
    axes.set(
        title=f"bytes moved in step {representative_step(trial)}, forward and backward, sum over the ranks of a group\n"
        "green: as requested, red: not as requested, grey: requested, but nothing moved",
        xlabel="rank",
    )
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    axes.title.set_fontsize(9)
    axes.invert_yaxis()


def group_label(group: UsedGroup) -> str:
    """Return the axis and ranks of a group, and the bytes it moved; the requested bytes too if the group is not as
    requested.
    """
    moved_text, requested_text = (bytes_text(count) if count else "0 B" for count in (group.moved, group.requested))
    text = f"{group.axis or 'not in the plan'} {ranks_text(group.ranks)}  {moved_text}"
    return text if group.comparison_text == AS_REQUESTED or not group.axis else f"{text}, requested {requested_text}"


def _draw_losses(axes: Any, trial: Trial) -> None:
    """Draw the losses of reference and trainer by step, and on a second axis their relative difference beside the bound.

    Without a bound only the difference is drawn.
    """
    steps = [step.step for step in trial.reference.steps]
    reference = np.array([step.loss for step in trial.reference.steps])
    observed = np.array([global_loss(trial, step) or np.nan for step in steps])
    axes.plot(steps, reference, "-", color="0.4", linewidth=3, label="reference (one device)")
    axes.plot(steps, observed, "o--", color="tab:blue", label="observed (all ranks)")
    axes.set(xlabel="step", ylabel="loss", title="loss, and its relative difference (right)")
    axes.set_xticks(steps)
    right = axes.twinx()
    difference = np.maximum(np.abs(observed / reference - 1), 1e-17)
    right.semilogy(steps, difference, "s:", color="tab:orange", label="difference")
    with contextlib.suppress(tolerance.NoBound):
        bound = trial.bounds.loss
        right.semilogy(steps, [bound[step] for step in steps], "-", color="tab:red", linewidth=1, label="bound")
    right.set_ylim(1e-17, 10)
    lines = [*axes.get_lines(), *right.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], fontsize=7, loc="center right")
