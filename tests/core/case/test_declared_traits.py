"""Traits that a case declares: read, stored, and put over those of the adapter."""

from __future__ import annotations

import pytest
import yaml
from literal import tiny_case

from harness.core import trainers
from harness.core.case.case import Case, CaseError, to_json
from harness.core.case.declared_traits import declaration, with_declared
from harness.core.case.loading import from_json, load_cases
from harness.core.case.traits import TrainerTraits


def declaring(text: str) -> Case:
    return from_json(to_json(tiny_case("fsdp_2")) | {"traits": yaml.safe_load(text)})


def test_a_case_declares_traits_over_those_of_its_trainer():
    case = declaring("{attention: null, loss_chunks: 4, op_keeps: [wq, w1]}")
    traits = with_declared(case, TrainerTraits(attention="fused", own_model=True))
    assert (traits.attention, traits.loss_chunks, traits.own_model) == (None, 4, True)
    assert traits.op_keeps == ("wq", "w1")
    assert from_json(to_json(case)) == case
    assert from_json(to_json(case) | yaml.safe_load(declaration(case.traits))) == case
    assert trainers.traits_by_launch(case, "llama3")["run"].attention is None


def test_the_defaults_of_a_file_declare_them_for_all_its_cases(tmp_path):
    text = "defaults: {traits: {loss_chunks: 2}}\ncases: {one: {why: x}, two: {why: x, traits: {own_model: true}}}\n"
    (tmp_path / "a.yaml").write_text(text)
    assert [case.traits for case in load_cases(tmp_path / "a.yaml")] == [
        (("loss_chunks", 2),),
        (("loss_chunks", 2), ("own_model", True)),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{loss_chunk: 4}", "did you mean 'loss_chunks'"),
        ("{loss_chunks: 0}", "must be at least 1"),
        ("{loss_chunks: true}", "expected int"),
        ("{loss_chunks: many}", "expected int"),
        ("{attention: flash}", "choose one of"),
        ("{wrapper: ddp}", "features: wrapper"),
        ("{rates: [0.1]}", "training: rates"),
        ("{allow: []}", "declared by allow"),
        ("[loss_chunks]", "expected a mapping"),
    ],
)
def test_what_is_no_trait_of_a_case_is_refused(text, problem):
    with pytest.raises(CaseError, match=problem):
        declaring(text)
