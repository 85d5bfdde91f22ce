"""What the matrix covers, told from the cases themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from literal import SGD, tiny_case

from harness.core.case.case import Case, CaseError, Saved
from harness.core.case.coverage import MISSING, option_pairs, pairs_text
from harness.core.case.dims import ParallelDims
from harness.core.case.loading import load_all, load_cases
from harness.core.case.options import all_options
from harness.core.trainers import load_adapter


class Picky:
    """A trainer that cannot do one thing."""

    name = "picky"

    def unsupported(self, case: Case) -> str | None:
        return "SGD with TP is beyond it" if case.dims.tp > 1 and case.training.optimizer == "sgd" else None


def state(cases: list[Case], one: str, other: str) -> tuple[tuple[str, ...], str]:
    found = option_pairs(cases, Picky().unsupported)
    return next((p.cases, p.reason) for p in found if {p.first.name, p.second.name} == {one, other})


def test_a_pair_is_covered_by_the_cases_that_have_both() -> None:
    case = replace(tiny_case("fsdp_2_tp_2"), name="both")
    assert state([case, tiny_case("tp_2")], "FSDP2", "TP") == (("both",), "")


def test_a_pair_without_a_case_is_refused_by_validation_or_by_the_trainer_or_missing() -> None:
    assert state([], "SGD", "TP") == ((), "SGD with TP is beyond it")
    assert state([], "DDP", "SGD") == ((), MISSING)
    assert state([], "DDP", "reshard never")[1].startswith("wrapper 'ddp' shards nothing")


def test_a_case_that_the_trainer_refuses_covers_nothing() -> None:
    refused = replace(tiny_case("fsdp_2_tp_2", SGD), name="refused")
    assert state([refused], "FSDP2", "TP") == ((), MISSING)
    resumed = replace(tiny_case("fsdp_2", SGD), resume=(Saved(after=1, dims=ParallelDims(tp=2)),))
    assert state([resumed], "FSDP2", "SGD") == ((), MISSING)


def test_no_pair_of_options_is_missing() -> None:
    """On a machine with a GPU nothing refuses async TP any more; its cases are still to be written there."""
    found = option_pairs(load_all(), load_adapter("llama3").unsupported)
    assert [
        f"{p.first.name} x {p.second.name}"
        for p in found
        if p.is_missing and "async TP" not in (p.first.name, p.second.name)
    ] == []


def test_alternatives_are_no_pair() -> None:
    kinds = {option.name: option.kind for option in all_options()}
    assert all(kinds[p.first.name] != kinds[p.second.name] for p in option_pairs([], Picky().unsupported))


def test_every_pair_is_told_in_a_line_and_counted() -> None:
    text = pairs_text(option_pairs([replace(tiny_case("fsdp_2_tp_2"), name="both")], Picky().unsupported))
    assert "FSDP2 x TP" in text and " both\n" in text
    assert "refused: SGD with TP is beyond it" in text
    assert text.splitlines()[-1].startswith(f"{len(text.splitlines()) - 2} pairs of options: ")


@pytest.mark.parametrize(("tier", "usual"), [("default", 1), ("nightly", 0)])
def test_how_many_pairs_the_default_tier_has_is_told_beside_all(tier: str, usual: int) -> None:
    text = pairs_text(option_pairs([replace(tiny_case("fsdp_2_tp_2"), tier=tier)], Picky().unsupported))
    assert f" 1 in a case ({usual} in one of the default tier), " in text


def cases_of(folder: Path, text: str) -> list[Case]:
    (folder / "own.yaml").write_text(f"cases:\n  own: {{why: w, {text}}}\n")
    return load_cases(folder / "own.yaml")


def test_a_case_of_options_has_them_all_and_what_it_says_itself_wins(tmp_path: Path) -> None:
    (case,) = cases_of(tmp_path, 'options: "CPU offload; AC, full; PP, GPipe; run twice", dims: {dp_shard: 4}')
    assert (case.dims.pp, case.dims.dp_shard, case.runs, case.model.n_layers) == (2, 4, 2, 4)
    assert (case.features.cpu_offload, case.features.activation_checkpointing) == (True, "full")


def test_an_option_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="unknown 'AC, all'"):
        cases_of(tmp_path, 'options: "SGD; AC, all"')
