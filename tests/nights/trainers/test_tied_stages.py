"""Tied embeddings over pipeline stages, on real ranks: ways to keep two copies alike, and what is said where they part."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import ROOT
from harness.core.case.loading import find_case, load_all
from harness.core.judge.result import Verdict
from harness.core.run.options import Options
from harness.core.run.run_case import run_case
from harness.faults import fault
from harness.faults import operators as op
from harness.nights.pages.pictures import draw_judged

SENDING = str(ROOT / "tests" / "tied_by_send.py")


def made(does: op.Operator) -> object:
    return fault(breaks="a test", bug="none", case="pp_2_tied", caught_by="gradients", named="", does=does)


AS_PP_2 = pytest.mark.slow("real ranks; pp_2_tied is summed in the same way")
never_summed = op.skip_call(".tied:sum_gradients")
counted_twice = made(op.together(never_summed, op.change_argument(".clip:clip_gradients", copies=lambda _: ())))


@pytest.mark.parametrize(
    "name", ["pp_2_tied", *(pytest.param(name, marks=AS_PP_2) for name in ("pp_4_tied", "pp_2_fsdp_2_tied"))]
)
def test_gradients_that_stages_send_each_other_are_as_good_as_their_sum(tmp_path: Path, name: str) -> None:
    judgement = run_case(find_case(name, load_all()), Options(out=tmp_path, trainer=SENDING))
    assert judgement.verdict is Verdict.PASS, judgement.diagnosis
    assert draw_judged(judgement).is_file()  # a rank of another stage lacks the parameter that is shown


@pytest.mark.slow("real ranks; test_gradients_that_stages_send_each_other_are_as_good_as_their_sum has them")
def test_copies_that_train_apart_are_named_whatever_the_norm_counts_of_them(tmp_path: Path) -> None:
    options = Options(out=tmp_path, fault=f"{__file__}:counted_twice")
    judgement = run_case(find_case("pp_2_tied", load_all()), options)
    assert judgement.verdict is Verdict.FAIL and judgement.diagnosis is not None
    (cause,) = judgement.diagnosis.causes
    assert (cause.kind, cause.hint) == ("gradients not reduced", "the norm counts both copies")
    failed = {result.check for result in judgement.results if result.verdict is Verdict.FAIL}
    assert {*cause.explains} == failed >= {"gradients", "traffic", "grad_norm"}
