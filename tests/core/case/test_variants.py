"""Cases turned into another dtype, for trainers that compute in one only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness import ROOT
from harness.core import cli
from harness.core.case.case import Case, Saved
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.loading import find_case, load_all
from harness.core.case.variants import with_dtype
from harness.core.judge import golden
from harness.core.run import reference_cache
from harness.core.run.options import Options
from harness.core.run.reference_cache import noise_to_measure
from harness.core.run.supported import reason_against_dtype, reason_unsupported
from harness.core.trainers import load_adapter
from harness.reference.config import TrainingConfig

OWN = str(ROOT / "tests" / "own_float32_trainer.py")
CASES = load_all()


def test_a_turned_case_keeps_its_name_layout_and_recipe_and_has_no_golden() -> None:
    case = find_case("hsdp_2x2", CASES)
    turned = with_dtype(case, "float32")
    assert turned == replace(case, training=replace(case.training, dtype="float32"), file="")
    assert not turned.has_derived_bounds


def test_a_case_that_is_in_that_dtype_stays_what_it_is() -> None:
    case = find_case("bf16_fsdp_2", CASES)
    assert with_dtype(case, "float32") is case
    assert with_dtype(find_case("fsdp_2", CASES), None).file


def test_what_a_case_says_of_its_own_dtype_is_turned_as_well() -> None:
    features = Features(reduce_dtype="float64")
    recipe = TrainingConfig(compute_dtype="float64")
    case = Case(
        "x", "x", ParallelDims(dp_shard=2), training=recipe, features=features, resume=(Saved(1, features=features),)
    )
    turned = with_dtype(case, "float32")
    assert turned.training.compute_dtype == turned.features.reduce_dtype == "float32"
    assert turned.resume[0].features.reduce_dtype == "float32"


def test_a_trainer_that_cannot_compute_in_a_cases_dtype_is_told_the_option_that_judges_it() -> None:
    case, options = find_case("ddp_2", CASES), Options(trainer=OWN)
    told = "dtype float64: own_float32 computes in float32 only; add --dtype float32"
    assert reason_against_dtype(case, load_adapter(OWN)) == reason_unsupported(case, options) == told
    assert reason_unsupported(with_dtype(case, "float32"), options) is None
    assert reason_against_dtype(case, load_adapter("llama3")) is None


def test_noise_is_measured_where_no_golden_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_cache, "cpu_kind", lambda: "x86_64 GenuineIntel avx2 avx512f")
    known, own = find_case("float32_ddp", CASES), with_dtype(find_case("ddp_2", CASES), "float32")
    assert noise_to_measure(replace(known, file=""), Options()) == ()
    assert noise_to_measure(own, Options()) == ("float32 shares",)
    assert noise_to_measure(known, Options(device="cuda")) == ("float32 shares",)
    assert golden.load_golden(known).noise["float32 shares"].distance


def test_noise_measured_on_one_kind_of_cpu_is_not_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_cache, "cpu_kind", lambda: "x86_64 AuthenticAMD avx2")
    assert noise_to_measure(find_case("float32_ddp", CASES), Options()) == ("float32 shares",)
    assert noise_to_measure(find_case("ddp_2", CASES), Options()) == ()


def test_a_reference_kept_in_one_folder_is_not_used_on_another_kind_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = reference_cache.reference_key(find_case("ddp_2", CASES))
    monkeypatch.setattr(reference_cache, "cpu_kind", lambda: "another")
    assert reference_cache.reference_key(find_case("ddp_2", CASES)) != here


@pytest.mark.slow("real ranks; test_random_cases_run_on_a_trainer_in_float32 has such a trainer")
def test_a_trainer_in_float32_passes_all_checks_of_a_float64_case_that_is_turned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--trainer", OWN, "--out", str(tmp_path)]
    assert cli.main(["run", "ddp_2", *words]) == 2
    assert "add --dtype float32" in capsys.readouterr().err
    assert cli.main(["run", "ddp_2", "--dtype", "float32", *words]) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.startswith("PASS ddp_2")
    (folder,) = tmp_path.glob("ddp_2*float32*")
    assert (folder / "verdict.json").exists()


def test_random_cases_run_on_a_trainer_in_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["matrix", "--random", "1", "--seed", "1", "--dtype", "float32", "--trainer", OWN, "--out", str(tmp_path)]
    assert cli.main(words) == 0, capsys.readouterr().out
    assert "1 PASS" in capsys.readouterr().out
