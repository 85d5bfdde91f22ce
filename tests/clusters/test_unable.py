"""A rank that could not be run alone, for what a tensor without memory cannot answer, says nothing of the trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import CodeType
from typing import Any

import pytest
import torch
from literal import tiny_case, without_rank
from test_alone_judged import alone, results
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.clusters.judging import run_of_lone_ranks
from harness.clusters.unable import why_unable
from harness.core.evidence.records import Exit
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial


def raised(act: Callable[[torch.Tensor], object], asked: tuple[CodeType, ...] = ()) -> str:
    """What is said of what this raises of a tensor without memory."""
    with pytest.raises(Exception) as error, FakeTensorMode(allow_non_fake_inputs=True):
        act(torch.ones(4, 4))
    return why_unable(error.value, asked)


def test_a_shape_that_follows_from_contents_is_not_the_trainers_failure() -> None:
    assert raised(lambda tensor: tensor[tensor > 0]) == (
        "it asks for what is in a tensor (DynamicOutputShapeException: aten.nonzero.default), and alone nothing is"
    )


def test_contents_that_are_read_are_not_the_trainers_failure() -> None:
    assert "(RuntimeError: .numpy() is not supported for tensor subclasses.)" in raised(lambda tensor: tensor.numpy())
    assert "DataDependentOutputException" in raised(lambda tensor: torch.allclose(tensor, tensor))
    assert "NotImplementedError: Not available for 'meta'" in raised(lambda tensor: bytes(tensor.untyped_storage()))


def test_what_is_raised_while_contents_were_asked_for_came_of_that() -> None:
    def handled(tensor: torch.Tensor) -> None:
        try:
            tensor.numpy()
        except RuntimeError:
            raise KeyError("rows") from None

    assert raised(handled).startswith("it asks for what is in a tensor (RuntimeError: .numpy()")


class Watching(TorchDispatchMode):
    """As the pre-flight's own."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_a_compiler_that_refuses_the_pre_flights_own_mode_is_not_the_trainers_failure() -> None:
    """As optimizers compile their step."""
    compiled = torch.compile(lambda tensor: tensor / tensor.norm(), fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError) as error, Watching():
        compiled(torch.ones(4))
    assert why_unable(error.value, ()).startswith("torch refuses it to a rank alone")


@pytest.mark.parametrize(
    "words",
    [
        "monitored_barrier is only implemented for GLOO backend",
        "Backend fake does not yet support sequence numbers",
        'fn INTERNAL ASSERT FAILED at "/torch/csrc/distributed/c10d/init.cpp":234, please report. Not implemented',
        "Mixing fake modes NYI x.fake_mode=1 vs self=2",
    ],
)
def test_what_the_group_of_ranks_that_are_not_there_cannot_do_is_not_the_trainers_failure(words: str) -> None:
    assert why_unable(RuntimeError(words), ()).startswith("torch refuses it to a rank alone")


def test_a_compiled_function_that_raises_by_itself_is_the_trainers_failure() -> None:
    assert why_unable(RuntimeError("the mode of dispatch is wrong"), ()) == ""


def test_shapes_that_do_not_fit_are_the_trainers_failure() -> None:
    assert raised(lambda tensor: tensor @ torch.ones(5, 5)) == ""
    assert raised(lambda tensor: tensor.view(3, 5)) == ""


def test_who_raises_after_it_was_given_a_number_goes_on_by_it() -> None:
    def refuses(tensor: torch.Tensor) -> None:
        raise ValueError("the norm is 1.0")

    assert raised(refuses) == ""
    assert raised(refuses, (refuses.__code__,)) == (
        "it asks a tensor for a number, which alone is 1, and goes on by it (ValueError: the norm is 1.0)"
    )


def stopped(unable: dict[int, str]) -> Trial:
    """Rank 3 raised."""
    trial = without_rank(alone(tiny_case("hsdp_2x2")), 3)
    exits = (trial.run.exits[0], Exit(3, "raised", 1, error="RuntimeError: no", blamed=True))
    return replace(trial, run=run_of_lone_ranks(replace(trial.run, exits=exits), (0, 3), unable))


def test_a_rank_that_could_not_be_run_alone_is_unknown_to_all_checks() -> None:
    found = results(stopped({3: "it saves tensors"}))
    assert found["completed"].verdict is Verdict.UNKNOWN
    assert found["completed"].note == "rank 3 could not be run alone: it saves tensors"
    judged = {result.verdict for name, result in found.items() if name != "completed"}
    assert judged == {Verdict.UNKNOWN, Verdict.NOT_APPLICABLE}


def test_a_rank_that_failed_otherwise_fails() -> None:
    assert results(stopped({}))["completed"].verdict is Verdict.FAIL


def test_what_one_rank_could_not_excuses_no_other() -> None:
    trial = stopped({0: "it saves tensors"})
    assert results(trial)["completed"].verdict is Verdict.FAIL
