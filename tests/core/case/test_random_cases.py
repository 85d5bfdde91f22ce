"""Random cases: a name is a case, all that was drawn is in it, and what a trainer cannot run is passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core import cli
from harness.core.case.case import CaseError
from harness.core.case.options import all_options
from harness.core.case.random_cases import (
    LARGEST_WORLD,
    LEFT_OUT_KINDS,
    case_of_name,
    draw_random_case,
    draw_runnable_cases,
)

DRAWN = [draw_random_case(3, number) for number in range(1, 201)]


def test_a_name_says_which_case_it_is() -> None:
    case = draw_random_case(3, 17)
    assert case_of_name("random_3_17") == case and case.name == "random_3_17"
    assert [case_of_name(name) for name in ("hsdp_2x2", "random_3", "my_random_3_17")] == [None, None, None]


def test_other_seeds_and_numbers_draw_other_cases() -> None:
    assert len({case.why for case in DRAWN}) > 190
    assert [case.why for case in DRAWN] != [draw_random_case(4, number).why for number in range(1, 201)]


def test_a_case_has_all_that_its_why_says() -> None:
    known = {option.name: option for option in all_options()}
    for case in DRAWN:
        rest = case.why
        for name in sorted(known, key=len, reverse=True):
            if name in rest:
                assert known[name].is_requested_by(case), (case.name, name)
                rest = rest.replace(name, "")
        assert not rest.strip(", "), case.why
        assert case.dims.world_size <= LARGEST_WORLD and not case.file


def test_every_option_is_drawn_but_those_left_out() -> None:
    every = [draw_random_case(5, number) for number in range(1, 601)]
    never = {option.name for option in all_options() if not any(map(option.is_requested_by, every))}
    assert never == {option.name for option in all_options() if option.kind in LEFT_OUT_KINDS}


def test_what_cannot_run_is_passed_over_and_keeps_its_number() -> None:
    chosen = draw_runnable_cases(2, 3, lambda case: "no pipelines" if case.dims.pp > 1 else None)
    assert [case.name for case in chosen] == [case.name for case in DRAWN if case.dims.pp == 1][:2]


def test_a_trainer_that_runs_none_is_told_with_the_reasons() -> None:
    told = "--random 1: of 2000 drawn this trainer runs 0, of the last 2000 none; most often because of: "
    with pytest.raises(CaseError) as refused:
        draw_runnable_cases(1, 3, lambda case: "no pipelines" if case.dims.pp > 1 else "nothing runs")
    assert str(refused.value).startswith(told) and " x nothing runs; " in str(refused.value)


def test_cases_are_drawn_in_the_dtype_that_a_trainer_computes_in() -> None:
    chosen = draw_runnable_cases(
        5, 3, lambda case: None if case.training.dtype == "float32" else "float32 only", dtype="float32"
    )
    assert [case.name for case in chosen] == [case.name for case in DRAWN][:5]
    assert {case.training.dtype for case in chosen} == {"float32"}


def test_a_choice_among_random_cases_is_refused_and_not_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--random", "2", "-k", "hsdp"]) == 2
    assert "-k cannot be combined with --random" in capsys.readouterr().err


def test_random_cases_run_and_one_is_repeated_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--random", "2", "--seed", "10", "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    shown = capsys.readouterr().out
    assert "2 PASS" in shown
    name = next(line.split()[0] for line in shown.splitlines() if line.startswith("random_10_"))
    assert cli.main(["run", name, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"PASS {name}\n")
