"""Mistakes on real ranks that were once passed, or told wrongly: which checks fail, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import wrong_trainers

from harness.core.case.loading import find_case, load_all
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Diagnosis, Result, Verdict
from harness.core.judge.stored_trial import load_trial
from harness.core.report.cause_text import diagnosis_line
from harness.core.run.options import Options
from harness.core.run.run_case import run_case
from harness.reference.model import Llama, kept_share


@dataclass(frozen=True)
class Ran:
    judgement: Judgement
    results: dict[str, Result]
    diagnosis: Diagnosis

    @property
    def broken(self) -> set[str]:
        return {name for name, result in self.results.items() if result.verdict is Verdict.FAIL}

    @property
    def said(self) -> dict[str, str]:
        return dict(self.diagnosis.evidence)


AS_A_FAULT = pytest.mark.slow(
    "real ranks; test_units_that_no_backward_freed_are_found_and_so_are_their_gradients runs one"
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wrong")


def run(name: str, out: Path) -> Ran:
    case = getattr(wrong_trainers, name).case
    options = Options(out=out, fault=f"{wrong_trainers.__file__}:{name}", timeout=60)
    judgement = run_case(find_case(case, load_all()), options)
    assert judgement.verdict is Verdict.FAIL and judgement.diagnosis is not None
    assert "not tried" not in dict(judgement.diagnosis.evidence)
    return Ran(judgement, {result.check: result for result in judgement.results}, judgement.diagnosis)


def test_units_that_no_backward_freed_are_found_and_so_are_their_gradients(out: Path) -> None:
    ran = run("units_stay_gathered", out)
    assert {"reshard", "memory", "traffic", "loss", "gradients"} <= ran.broken
    assert ran.results["completed"].verdict is Verdict.PASS
    assert ran.results["gradients"].examined == 2 * 3 * 21
    assert ran.diagnosis.kinds[0] == "left gathered by backward"
    first = load_trial(ran.judgement.folder).ranks[0].steps[0]
    assert first.gathered is not None and len({*first.gathered}) == len(first.gathered) == 21
    lacking = {(f.step, f.observed) for f in ran.results["traffic"].findings}
    assert lacking == {(2, 0), (3, 0)}


@AS_A_FAULT
def test_a_factor_of_one_step_is_no_proof_of_where_it_comes_from(out: Path) -> None:
    ran = run("rounded_token_count", out)
    assert ran.broken == {"gradients", "grad_norm", "reported_loss"}
    assert ran.diagnosis.kinds == ("not explained",)  # located: one step is no proof of a factor
    assert "tokens" not in diagnosis_line(ran.diagnosis) and "step 3 on" not in diagnosis_line(ran.diagnosis)


@AS_A_FAULT
def test_what_each_rank_lacks_is_said_of_that_rank(out: Path) -> None:
    ran = run("each_rank_steps_on_a_half", out)
    assert ran.diagnosis.kinds[0] == "incomplete" and "completed" in ran.broken
    lacking = {rank: {f.name for f in ran.results["completed"].findings if f.rank == rank} for rank in (0, 1)}
    assert "layers.0.attention.wq.weight" in lacking[0] and "tok_embeddings.weight" in lacking[1]
    assert not lacking[0] & lacking[1]
    assert ran.diagnosis.causes[0].ranks == (0, 1)


@AS_A_FAULT
def test_tokens_and_positions_that_are_cut_alike_are_no_wrong_positions(out: Path) -> None:
    ran = run("short_step_is_cut_after_sharding", out)
    assert "samples" in ran.broken
    assert {"peers differ", "positions"}.isdisjoint(ran.diagnosis.kinds)
    assert ran.diagnosis.kinds[0] == "sequence cut otherwise"
    assert "explains" not in ran.said  # what was received is no cause of itself
    (finding,) = ran.results["samples"].findings
    assert (finding.rank, finding.step) == (1, 2) and "16-23" in finding.observed and "8-15" in finding.expected


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("anomaly_detection_from_the_start", {"settings"}),
        pytest.param("copies_for_the_time_of_a_step", {"memory"}, marks=AS_A_FAULT),
        pytest.param("mesh_in_another_order", {"placements"}, marks=AS_A_FAULT),
    ],
)
def test_what_no_number_shows_is_caught_by_one_check(name: str, broken: set[str], out: Path) -> None:
    ran = run(name, out)
    assert ran.broken == broken
    assert ran.results["loss"].verdict is ran.results["gradients"].verdict is Verdict.PASS


@AS_A_FAULT
def test_the_interpolated_band_of_rope_scaling_is_under_test(out: Path) -> None:
    assert {"loss", "gradients"} <= run("interpolated_band_is_a_step", out).broken


def test_each_case_that_rescales_has_frequencies_in_all_three_bands() -> None:
    scaled = [case for case in load_all() if case.model.rope_scaling is not None]
    assert scaled
    for case in scaled:
        share = kept_share(_frequencies(case.model), case.model.rope_scaling)
        assert (share >= 1).any() and (share <= 0).any() and ((share > 0) & (share < 1)).any(), case.name


def _frequencies(model: Llama) -> torch.Tensor:
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
    return 1.0 / model.rope_theta**exponents
