"""The picture of a recipe with noise: correct runs, the bound and deliberate mistakes, at distances that can be compared."""

from __future__ import annotations

from pathlib import Path

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.run.options import Options
from harness.faults import margins
from harness.reference.config import TrainingConfig


def test_correct_runs_lie_within_the_bound_and_each_mistake_beyond_also_where_ranks_hold_flat_vectors(
    tmp_path: Path,
) -> None:
    recipe = TrainingConfig(steps=1, dtype="float32", global_batch=8)
    cases = [
        Case("flat", "x", ParallelDims(dp_shard=2), features=Features(wrapper="fsdp1"), training=recipe),
        Case("whole", "x", ParallelDims(dp_shard=2), training=recipe),
    ]
    one = margins.make_margin(cases, Options(out=tmp_path))
    assert all(max(one.ratios(distances).values()) < 1 for distances in one.correct.values())
    assert all(max(one.ratios(distances).values()) > 1 for distances in one.mistakes.values())
    assert one.recipe.startswith("float32, float32 shares")
    assert margins.margin_table(one).count("within") == 2
    assert margins.draw_all([one, one], tmp_path).stat().st_size > 0
