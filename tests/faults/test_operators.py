"""Operators: what each puts in the place of a target, when it says that it fired, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from harness import ROOT
from harness.faults import FaultError, faults_of_file, load_fault
from harness.faults import operators as op


class Trainer:
    """What operators are tried on, as a module of its own."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def step(self, rate: float = 1.0, **options: float) -> float:
        self.did.append(f"step {rate} {options}")
        return rate


@pytest.fixture(autouse=True)
def trainer() -> Iterator[type[Trainer]]:
    fresh = type("Trainer", (), dict(vars(Trainer)))
    module = ModuleType("operated_on")
    module.Trainer, module.scaled = fresh, lambda loss, *, ranks: loss * ranks  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield fresh
    del sys.modules[module.__name__]


STEP, SCALED = "operated_on:Trainer.step", "operated_on:scaled"


def applied(does: op.Operator) -> list[bool]:
    fired: list[bool] = []
    does(lambda: fired.append(True))
    return fired


def scaled(loss: float, *, ranks: int) -> float:
    return sys.modules["operated_on"].scaled(loss, ranks=ranks)


def test_a_documented_target_is_found_by_its_old_name_too() -> None:
    assert op.find_target(".trainer:scaled") == op.find_target(".trainer:scale_loss")


def test_a_call_is_replaced_and_each_time_fires(trainer: type[Trainer]) -> None:
    fired = applied(op.instead(SCALED, lambda original, loss, *, ranks: -original(loss, ranks=ranks)))
    assert fired == []
    assert [scaled(2, ranks=4), scaled(3, ranks=4)] == [-8, -12]
    assert len(fired) == 2


def test_what_is_applied_and_never_called_has_not_fired() -> None:
    assert applied(op.skip_call(SCALED)) == []


def test_a_call_is_left_alone_and_does_not_fire_where_the_condition_does_not_hold() -> None:
    fired = applied(op.skip_call(SCALED, result=0, when=lambda loss, *, ranks: loss > 2))
    assert [scaled(2, ranks=4), scaled(3, ranks=4)] == [8, 0]
    assert len(fired) == 1


def test_what_comes_before_and_after_a_call_sees_its_arguments_and_leaves_its_result(trainer: type[Trainer]) -> None:
    told = lambda word: lambda self, *args: self.did.append(f"{word} {args}")  # noqa: E731
    fired = applied(op.together(op.before_call(STEP, told("before")), op.after_call(STEP, told("after"))))
    one = trainer()
    assert one.step(0.5) == 0.5
    assert one.did == ["before (0.5,)", "step 0.5 {}", "after (0.5,)"]
    assert len(fired) == 2


def test_a_call_is_made_twice(trainer: type[Trainer]) -> None:
    applied(op.repeat_call(STEP))
    one = trainer()
    one.step()
    assert one.did == ["step 1.0 {}"] * 2


def test_an_argument_is_overridden_however_it_is_given(trainer: type[Trainer]) -> None:
    fired = applied(op.override_argument(STEP, rate=3.0))
    one = trainer()
    assert [one.step(), one.step(0.5), one.step(rate=0.5), len(fired)] == [3.0, 3.0, 3.0, 3]


def test_an_argument_that_is_that_already_does_not_fire(trainer: type[Trainer]) -> None:
    fired = applied(op.override_argument(STEP, rate=None))
    assert (trainer().step(None), fired) == (None, [])


def test_an_option_that_is_passed_on_is_overridden_too(trainer: type[Trainer]) -> None:
    applied(op.override_argument(STEP, nesterov=1.0))
    one = trainer()
    one.step(0.5)
    assert one.did == ["step 0.5 {'nesterov': 1.0}"]


def test_arguments_and_results_are_changed_by_what_they_were_and_operators_stack() -> None:
    fired = applied(op.together(op.change_argument(SCALED, ranks=lambda n: n // 2), op.scale_result(SCALED, 10)))
    assert (scaled(3, ranks=4), len(fired)) == (60, 2)


def test_a_result_that_stays_as_it_is_does_not_fire() -> None:
    fired = applied(op.change_result(SCALED, lambda loss: 0 if loss > 8 else loss))
    assert (scaled(2, ranks=4), len(fired), scaled(3, ranks=4), len(fired)) == (8, 0, 0, 1)


def test_a_gradient_is_scaled_and_its_loss_is_not() -> None:
    import torch

    fired = applied(op.scale_gradient(SCALED, 0.25))
    loss = torch.ones((), requires_grad=True)
    result = scaled(loss, ranks=2)
    result.backward()
    assert (result.item(), loss.grad.item(), len(fired)) == (2.0, 0.5, 1)


def test_on_other_ranks_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    fired = applied(op.together(op.on_rank(0, op.skip_call(SCALED)), op.on_rank((2, 3), op.skip_call(SCALED))))
    assert (scaled(2, ranks=4), fired) == (8, [])
    applied(op.on_rank((0, 1), op.skip_call(SCALED)))
    assert scaled(2, ranks=4) is None


def test_one_call_of_many_is_chosen_by_its_number() -> None:
    applied(op.skip_call(SCALED, when=op.nth_call(2, 3)))
    assert [scaled(2, ranks=1) for _ in range(4)] == [2, None, None, 2]


def test_an_act_comes_just_before_the_step_it_is_due_in(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_pre_hooks", OrderedDict())
    weight = torch.nn.Parameter(torch.ones(()))
    weight.grad = torch.ones(())
    optimizer = torch.optim.SGD([weight], lr=1.0)
    seen: list[float] = []
    fired = applied(op.before_step(2, lambda: seen.append(weight.item())))
    for _ in range(3):
        optimizer.step()
    assert (seen, len(fired)) == ([0.0], 1)


def test_an_act_imports_its_target_when_it_comes_to_that() -> None:
    act = op.make_call("operated_on:scaled", 2, ranks=3)
    assert act("whatever", its="call was given") == 6


@pytest.mark.parametrize(
    "does, message",
    [
        (op.skip_call("operated_on:scale"), "'operated_on:scale': operated_on has no 'scale' (did you mean 'scaled'?)"),
        (op.skip_call("operated_on:Trainer.stop"), "Trainer has no 'stop' (did you mean 'step'?)"),
        (op.skip_call("harness.faults.operator:call"), "did you mean 'harness.faults.operators'?"),
        (op.skip_call("operated_on.scaled"), "'operated_on.scaled': one is given as 'module:attribute'"),
        (op.override_argument(SCALED, rank=1), "'operated_on:scaled' has no argument 'rank' (did you mean 'ranks'?)"),
    ],
)
def test_a_target_that_does_not_exist_is_refused_with_the_nearest_name(does: op.Operator, message: str) -> None:
    with pytest.raises(FaultError, match="target") as refused:
        applied(does)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "module", ["nothing", "json.decoder.nothing", "json.decoder.nothing.below", "nothing.inside.below"]
)
def test_no_module_is_beside_one_whose_parent_is_missing_or_no_package(module: str) -> None:
    assert op._neighbour_modules(module) == []


def test_a_target_without_a_package_is_one_of_the_trainers() -> None:
    owner, name = op.find_target(".clip:sum_of_squares")
    assert (owner.__name__, name) == ("harness.core.trainers.llama3.clip", "sum_of_squares")


OWN_FAULTS = """
from functools import partial

from harness.faults import fault
from harness.faults import operators as op

WORDS = dict(breaks="-", bug="-", case="fsdp_2", caught_by="loss gradients", named="-")

data = fault(does=op.scale_result("operated_on:scaled", 10), **WORDS)

@fault(**WORDS)
@partial(op.instead, "operated_on:scaled")
def code_under_an_operator(original, loss, *, ranks):
    return original(loss, ranks=ranks) * 10

@fault(**WORDS)
def code(fired):
    op.scale_result("operated_on:scaled", 10)(fired)
"""


@pytest.mark.parametrize("name", ["data", "code_under_an_operator", "code"])
def test_a_fault_is_data_or_code_and_has_the_name_it_has_in_its_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_FAULTS)
    assert [fault.name for fault in faults_of_file(file)] == ["data", "code_under_an_operator", "code"]
    fault = load_fault(f"{file}:{name}")
    assert (fault.name, fault.spec, fault.caught_by) == (name, f"{file}:{name}", ("loss", "gradients"))
    fired = applied(fault.apply)
    assert (scaled(2, ranks=4), len(fired)) == (80, 1)


APPLY_ALL = """
from harness.faults import FaultError, all_faults, operators
operators.on_rank = lambda rank, does: does
for fault in all_faults():
    try:
        fault.apply(lambda: None)
    except FaultError as error:
        print(fault.name, error)
"""


def test_every_seam_at_which_the_catalogue_replaces_something_exists() -> None:
    """In a process of its own, as what is replaced is not put back."""
    run = subprocess.run([sys.executable, "-c", APPLY_ALL], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
