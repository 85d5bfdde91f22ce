"""Ranks really run alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.clusters.chosen import ChosenRanks
from harness.clusters.judging import judge_lone_ranks
from harness.clusters.launches import run_lone_ranks
from harness.clusters.request import Request
from harness.clusters.text import preflight_text
from harness.core.case.loading import find_case, load_all
from harness.core.evidence.records import Collective, RankEvidence
from harness.core.evidence.step import StepEvidence
from harness.core.evidence.store import load_run
from harness.core.report.cause_text import diagnosis_line
from harness.core.run.options import Options
from harness.core.run.run_case import run_case


def of_each_step(read: Callable[[StepEvidence], Any]) -> Callable[[RankEvidence], Any]:
    return lambda evidence: {step.step: read(step) for step in evidence.steps}


def call(one: Collective) -> tuple[Any, ...]:
    """Without the group's name, and of what lies outside of steps nothing."""
    return one.step, one.phase, one.op, one.ranks, one.dtype, one.bytes, one.peer


FIELDS: dict[str, Callable[[RankEvidence], Any]] = {
    "parameters": lambda e: {
        t.fqn: (t.global_shape, t.dtype, t.mesh, t.placements, t.value.shape) for t in e.parameters
    },
    "groups": lambda e: Counter(group.ranks for group in e.groups if len(group.ranks) > 1),
    "wrappers": lambda e: e.structure,
    "collectives in order": lambda e: [call(one) for one in e.collectives if one.step],
    "collectives before and after": lambda e: [call(one) for one in e.collectives if not one.step],
    "pipeline actions": of_each_step(lambda s: s.actions),
    "memory held": of_each_step(lambda s: s.memory),
    "after forward": of_each_step(lambda s: s.after_forward),
    "module calls": of_each_step(lambda s: s.activity.calls),
    "matmuls": of_each_step(lambda s: s.activity.matmuls),
    "attention": of_each_step(lambda s: s.activity.attention),
    "random numbers": of_each_step(lambda s: s.activity.random),
    "hooks on saved tensors": of_each_step(lambda s: s.activity.saved),
    "gradients' shapes": of_each_step(lambda s: {fqn: value.shape for fqn, value in s.gradients.items()}),
    "parameters' shapes": of_each_step(lambda s: {fqn: value.shape for fqn, value in s.parameters.items()}),
    "optimizer state": of_each_step(
        lambda s: {fqn: {key: value.shape for key, value in state.items()} for fqn, state in s.optimizer_state.items()}
    ),
    "copies of weights": of_each_step(lambda s: s.copied),
    "settings": of_each_step(lambda s: s.settings),
    "kept beside": lambda e: Counter((held.shape, held.dtype, held.bytes) for held in e.held or ()),
}


def differences(real: RankEvidence, alone: RankEvidence) -> dict[str, tuple[Any, Any]]:
    """Return both values of each field in which they differ."""
    pairs = {name: (read(real), read(alone)) for name, read in FIELDS.items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def test_a_rank_alone_leaves_the_evidence_that_it_leaves_among_its_peers(tmp_path: Path) -> None:
    case = find_case("fsdp_2_tp_2", load_all())
    short = replace(case, training=replace(case.training, steps=1), file="")
    run_case(short, Options(out=tmp_path))
    real, alone = load_run(tmp_path / case.name / "run"), run_lone_ranks(short, (0, 3), tmp_path / "alone").run
    assert {rank: differences(real.ranks[rank], alone.ranks[rank]) for rank in (0, 3)} == {0: {}, 3: {}}


def test_hsdp_that_runs_as_fsdp_is_named_on_one_of_64_ranks(tmp_path: Path) -> None:
    case = Request(dims="dp_replicate=2,dp_shard=32", seq=64).build_case()
    flown = run_lone_ranks(case, (3,), tmp_path / "ranks", fault="hsdp_runs_as_fsdp")
    verdicts = judge_lone_ranks(case, flown)
    assert verdicts.diagnosis is not None
    assert diagnosis_line(verdicts.diagnosis) == (
        "HSDP ran as FSDP: parameters are sharded over 64 ranks, requested 32, replicated 2 times"
    )
    text = preflight_text(case, ChosenRanks({"as requested": (3,)}, 0), flown, verdicts, 0)
    assert "FAIL for 1 of 64 ranks" in text
    assert "63 other ranks" in " ".join(text.split())
