"""Of what is kept in several ways what is told, and switches that are not as requested. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from typing import Any

from diagnosed import DDP_2, broken, expect, expect_first, seen_text
from literal import tiny_case, trial_of, with_rank, with_step

from harness.diagnosis.costs import memory_kept, other_settings
from harness.evidence.records import HeldTensor
from harness.judge.trial import Trial

LOGITS = "float64 [2, 4, 8]"


def on(trial: Trial, rank: int, **by_step: list[Any]) -> Trial:
    """What a rank has after each step, by field."""
    for what, values in by_step.items():
        for step, value in enumerate(values, start=1):
            trial = with_step(trial, rank, step, **{what: value})
    return trial


# ---- memory


def test_what_grows_is_told_with_the_ranks_and_what_nothing_waited_for() -> None:
    grown = [{LOGITS: 512 * step, "float64 [5]": 40 * step} for step in (1, 2, 3)]
    trial = on(trial_of(tiny_case("fsdp_2")), 1, kept=grown, unwaited=[1, 2, 3])
    expect(
        trial,
        """\
memory held between steps grows by 552 B a step on rank 1: float64 [2, 4, 8], float64 [5]; torch keeps the results of 2 functional collectives that nothing waited for
  memory: rank 1, retained more after each step: expected at most 128 B, observed 552 B (steps 1 to 3: float64 [2, 4, 8], float64 [5])
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )
    expect_first(
        on(trial, 0, kept=grown),
        """memory held between steps grows by 552 B a step: float64 [2, 4, 8], float64 [5]""",
    )


def test_of_all_that_is_kept_what_is_retained_is_told_first() -> None:
    trial = on(trial_of(tiny_case("fsdp_2")), 1, graphs_retained=[1, 1, 1], copied=[{"other": 936}] * 3)
    trial = with_rank(trial, 0, held=(HeldTensor((300,), "float32", 1200),))
    kinds = [fact.cause.kind for fact in memory_kept(trial, broken("memory"))]
    assert kinds == ["retained", "retained graph", "copied"]
    expect(
        trial,
        """\
1.2 kB of float32 are retained in unaccounted tensors on rank 0: 1 tensor with no parameter's shape
  memory: rank 0, unaccounted tensors after the last step: expected at most 128 B, observed 1.2 kB (1200) (1 tensor: float32 [300])
  if intended: allow: [{what: kept, bytes: 1072, reason: WHY}]
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )
    assert not seen_text(memory_kept, trial, "traffic")


# ---- switches


def switched(name: str, value: str, ranks: tuple[int, ...] = (0, 1), since: int = 1, trial: Trial = DDP_2) -> Trial:
    for rank in ranks:
        for step in trial.ranks[rank].steps[since - 1 :]:
            trial = with_step(trial, rank, step.step, settings=step.settings | {name: (value,)})
    return trial


def test_a_switch_is_told_with_its_ranks_and_first_step() -> None:
    expect(
        switched("autograd anomaly detection", "on", ranks=(1,), since=2),
        """\
autograd anomaly detection is on, requested off (on rank 1 from step 2 on)
  settings: rank 1, step 2, autograd anomaly detection: expected off, observed on
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )
    expect_first(
        switched("deterministic algorithms", "on"),
        """deterministic algorithms are on, requested off (from step 1 on)""",
    )


def test_a_switch_that_changes_numbers_is_told_before_others() -> None:
    trial = switched("default dtype", "bfloat16", ranks=(1,), trial=switched("autograd anomaly detection", "on"))
    expect_first(
        trial,
        """default dtype is bfloat16, requested float32 (on rank 1 from step 1 on)""",
    )
    assert not seen_text(other_settings, trial, "traffic")
