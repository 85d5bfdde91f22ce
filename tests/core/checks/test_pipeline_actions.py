"""The check `schedule` and what is said when it is broken, on literal evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from checked import like
from literal import TINY, judged, tiny_case
from literal_reference import reference_of

from harness.core.case.case import Case, Saved
from harness.core.case.dims import ParallelDims
from harness.core.causes.engine import explain
from harness.core.causes.request import neighbours
from harness.core.causes.structure_facts import facts_of_structure as facts
from harness.core.checks import schedule
from harness.core.evidence.records import RankEvidence, Run
from harness.core.evidence.step import StepEvidence
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.core.plan.stages import actions_of_rank


def pp_2(name: str = "1F1B", **features: Any) -> Case:
    return tiny_case(
        ParallelDims(pp=2), model=replace(TINY, n_layers=8), **({"schedule": name, "microbatches": 4} | features)
    )


def trial_of(requested: Case, ran: Case | None = None) -> Trial:
    """Ranks that did what `ran` prescribes, judged as `requested`; nothing but their actions was seen."""
    ranks = {rank: _rank(ran or requested, rank) for rank in range(2)}
    run = Run("run", 2, (), ranks)
    return Trial(requested, make_plan(requested), run, reference_of(requested))


def _rank(case: Case, rank: int) -> RankEvidence:
    done = tuple(map(str, actions_of_rank(case, rank))) * case.features.accumulation
    steps = tuple(StepEvidence(step, (), None, None, None, {}, {}, {}, {}, actions=done) for step in (1, 2, 3))
    return RankEvidence(rank, 2, (), (), (), steps)


def with_actions(trial: Trial, rank: int, actions: tuple[str, ...]) -> Trial:
    steps = tuple(replace(step, actions=actions) for step in trial.ranks[rank].steps)
    ranks = trial.ranks | {rank: replace(trial.ranks[rank], steps=steps)}
    return replace(trial, run=replace(trial.run, ranks=ranks))


def named(trial: Trial) -> dict[str, Any]:
    """What of the request is another; "actions" where nothing is proven."""
    found = explain(trial, [schedule.check(trial)], (neighbours,), (facts,))
    assert [fact.cause.kind for fact in found.facts] == ["other actions"] * (not found.proofs)
    (*proven,) = (dict(one.cause.details) for proof in found.proofs for one in proof.hypotheses)
    return proven[0] if proven else {"actions": schedule.check(trial).findings[0].ranks}


def test_what_the_schedule_prescribes_passes() -> None:
    for name in ("GPipe", "1F1B"):
        result = schedule.check(trial_of(pp_2(name)))
        assert (result.verdict, result.examined) == (Verdict.PASS, 2 * 3 * 8)


def test_without_a_pipeline_it_does_not_apply() -> None:
    alone = replace(trial_of(pp_2()), case=tiny_case(ParallelDims()))
    assert schedule.check(alone).verdict is Verdict.NOT_APPLICABLE


def test_another_schedule_is_named() -> None:
    trial = trial_of(pp_2(), ran=pp_2("GPipe"))
    assert schedule.check(trial).findings[0] == like(
        0, "0B0 0F2 0B1 0F3 0B2 0B3 (8 in all)", "0F2 0F3 0B0 0B1 0B2 0B3 (8 in all)", step=1, quantity="action 2"
    )
    assert named(trial) == {"schedule": "GPipe"}


def test_another_schedule_of_four_stages_a_rank_is_named() -> None:
    requested, ran = (pp_2(name, stages_per_rank=4) for name in ("Interleaved1F1B", "LoopedBFS"))
    assert named(trial_of(requested, ran=ran)) == {"schedule": "LoopedBFS"}


def test_another_number_of_microbatches_is_named() -> None:
    trial = trial_of(pp_2(), ran=pp_2(microbatches=2))
    assert named(trial) == {"microbatches": 2}


def test_an_action_left_out_is_named() -> None:
    trial = trial_of(pp_2())
    trial = with_actions(trial, 1, trial.ranks[1].steps[0].actions[:-1])
    assert schedule.check(trial).findings[0] == like(
        1, "1B3 (8 in all)", "nothing more (7 in all)", step=1, quantity="action 7"
    )
    assert [*named(trial)] == ["actions"]


def test_two_actions_exchanged_are_shown() -> None:
    trial = trial_of(pp_2())
    first, second, *rest = trial.ranks[0].steps[0].actions
    trial = with_actions(trial, 0, (second, first, *rest))
    assert judged("schedule", trial).findings[0] == (
        like(
            0,
            "0F0 0F1 0B0 0F2 0B1 0F3 ... (8 in all)",
            "0F1 0F0 0B0 0F2 0B1 0F3 ... (8 in all)",
            step=1,
            quantity="action 0",
        )
    )
    assert [*named(trial)] == ["actions"]


def test_up_to_six_actions_are_shown_and_more_are_hinted_at() -> None:
    trial = trial_of(pp_2(microbatches=2))  # 0F0 0F1 0B0 0B1 on rank 0
    whole = "0F0 0F1 0B0 0B1 (4 in all)"
    told = judged("schedule", with_actions(trial, 0, tuple("abcdefg")))
    assert (told.verdict, told.examined) == (Verdict.FAIL, 24)
    assert told.findings == tuple(
        like(0, whole, "a b c d e f ... (7 in all)", step=step, quantity="action 0") for step in (1, 2, 3)
    )
    told = judged("schedule", with_actions(trial, 0, tuple("abcdef")))
    assert told.findings[0].observed == "a b c d e f (6 in all)"


def test_actions_beyond_the_schedule_are_found_at_its_end() -> None:
    trial = trial_of(pp_2(microbatches=2))
    done = trial.ranks[1].steps[0].actions
    assert judged("schedule", with_actions(trial, 1, (*done, *done))).findings[0] == like(
        1, "nothing more (4 in all)", "1F0 1B0 1F1 1B1 (8 in all)", step=1, quantity="action 4"
    )


def test_a_rank_without_any_action_is_named() -> None:
    assert named(with_actions(trial_of(pp_2()), 1, ())) == {"actions": (1,)}


def test_accumulation_repeats_the_schedule() -> None:
    requested = pp_2(accumulation=2, microbatches=2)
    assert schedule.check(trial_of(requested)).verdict is Verdict.PASS
    assert schedule.check(trial_of(requested, ran=pp_2(microbatches=2))).verdict is Verdict.FAIL


def test_a_resumed_launch_is_told_by_its_own_first_step() -> None:
    trial = trial_of(*(pp_2(name, resume=(Saved(2),)) for name in ("1F1B", "GPipe")))
    for rank in trial.ranks:
        (last,) = trial.ranks[rank].steps[2:]
        trial = replace(
            trial, run=replace(trial.run, ranks=trial.ranks | {rank: replace(trial.ranks[rank], steps=(last,))})
        )
    assert named(trial) == {"schedule": "GPipe"}
