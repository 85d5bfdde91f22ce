"""A script that resumes by a flag: its folder of checkpoints is known before it is built, as docs/adapters.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import ROOT
from harness.core import trainers
from harness.core.case.loading import load_all
from harness.core.cli import main
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Verdict
from harness.core.report.cause_text import diagnosis_line
from harness.core.run.options import Options, Unsupported
from harness.core.run.run_case import run_case
from harness.core.trainers.support import checkpoints

FLAGS = '''
    p.add_argument("--resume", default="")
    p.add_argument("--save-to", default="")
    p.add_argument("--finetune", action="store_true")
    p.add_argument("--stop-after", type=int, default=0)
    p.add_argument("--log-every"'''
RESUMES = """
    state = {"model": State(model, opt)}
    first = load(state, a.resume) if a.resume and not a.finetune else 0
    if a.finetune:
        dcp.load({"model": {"model": get_model_state_dict(model)}}, checkpoint_id=f"{a.resume}/step_2")
    for _ in range(first):
        next(loader)
    for step in range(first, a.stop_after or a.max_steps):
"""
SAVES = """
    if a.save_to:
        save(state, a.save_to, step + 1)
    dist.destroy_process_group()


if __name__"""
STATE = """
class State(Stateful):
    def __init__(self, model, opt):
        self.model, self.opt = model, opt

    def state_dict(self):
        model, opt = get_state_dict(self.model, self.opt)
        return {"model": model, "opt": opt}

    def load_state_dict(self, found):
        set_state_dict(self.model, self.opt, model_state_dict=found["model"], optim_state_dict=found["opt"])


def save(state, folder, step):
    dcp.save(state, checkpoint_id=f"{folder}/step_{step}")


def load(state, folder):
    dcp.load(state, checkpoint_id=f"{folder}/step_2")
    return 2


def main():
"""
IMPORTS = """
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
"""
SCRIPT = (
    ('\n    p.add_argument("--log-every"', FLAGS),
    ("\n    for step in range(a.max_steps):\n", RESUMES),
    ("\n    dist.destroy_process_group()\n\n\nif __name__", SAVES),
    ("\ndef main():\n", STATE),
    ("\nimport torch.distributed as dist\n", IMPORTS),
)
CASES = """
defaults:
  training: {all_valid: true, steps: 4, rates: [0.001, 0.002, 0.003, 0.0015]}
  model: {norm_eps: 1.0e-6}
cases:
  two_to_two: {dims: {dp_shard: 2}, resume: [{after: 2, dims: {dp_shard: 2}}], why: a test}
"""


FINETUNES = """

usual = adapter.arguments
adapter.arguments = lambda case, device: [*usual(case, device), *(["--finetune"] if case.model_of else [])]
adapter.starts_from_weights = True
"""


def changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a script that resumes, and the adapter that `harness init` began."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(changed((ROOT / "tests" / "script_trainer.py").read_text(), *SCRIPT))
    assert main(["init", "train.py"]) == 0
    Path("cases/first.yaml").write_text(CASES)
    return tmp_path


def judged(folder: Path) -> Judgement:
    (case,) = load_all(folder / "cases")
    return run_case(case, Options(folder / "out", trainers.absolute_spec("train_adapter.py", None)))


def verdicts(judgement: Judgement) -> dict[str, Verdict]:
    return {one.check: one.verdict for one in judgement.results if one.verdict is not Verdict.NOT_APPLICABLE}


def test_a_script_that_resumes_by_a_flag_is_judged_like_any_that_resumes(folder: Path) -> None:
    found = verdicts(judged(folder))
    assert found.pop("golden") is Verdict.UNKNOWN  # nobody has accepted it
    assert set(found.values()) == {Verdict.PASS}
    assert {"resume", "checkpoint", "initial_weights", "shard_contents", "traffic"} <= set(found)


def started_from_weights(more: str) -> dict[str, Verdict]:
    """more: what stands below the adapter."""
    Path("cases/first.yaml").write_text(CASES.replace("{after: 2,", "{after: 2, model_only: true,"))
    adapter = Path("train_adapter.py")
    adapter.write_text(adapter.read_text() + more)
    return verdicts(judged(Path.cwd()))


@pytest.mark.slow(
    "two launches; the first of these judges such a script, and tests/core/checks/test_resume.py what it may get wrong"
)
def test_a_script_that_can_start_from_weights_alone_passes(folder: Path) -> None:
    found = started_from_weights(FINETUNES)
    assert found.pop("golden") is Verdict.UNKNOWN
    assert set(found.values()) == {Verdict.PASS}


@pytest.mark.slow(
    "two launches; the first of these judges such a script, and tests/core/checks/test_resume.py what it may get wrong"
)
def test_one_whose_flag_does_so_but_is_not_given_breaks_resume(folder: Path) -> None:
    assert started_from_weights("\n\nadapter.starts_from_weights = True\n")["completed"] is Verdict.FAIL


@pytest.mark.slow(
    "two launches; the first of these judges such a script, and tests/core/checks/test_resume.py what it may get wrong"
)
def test_a_start_from_weights_alone_is_refused_where_the_adapter_does_not_say_that_it_can(folder: Path) -> None:
    with pytest.raises(Unsupported, match="has no starts_from_weights"):
        started_from_weights("")


@pytest.mark.slow(
    "two launches; the first of these judges such a script, and tests/core/checks/test_resume.py what it may get wrong"
)
def test_one_that_does_not_restore_its_optimizer_breaks_resume(folder: Path) -> None:
    restored = "    for _ in range(first):\n"
    Path("train.py").write_text(changed(Path("train.py").read_text(), (restored, f"    opt.state.clear()\n{restored}")))
    found = verdicts(judged(folder))
    assert found["resume"] is Verdict.FAIL
    assert found["initial_weights"] is found["shard_contents"] is Verdict.PASS


@pytest.mark.slow(
    "two launches; the first of these judges such a script, and tests/core/checks/test_resume.py what it may get wrong"
)
def test_a_checkpoint_that_is_not_there_is_named_with_its_path(folder: Path) -> None:
    saves = '    dcp.save(state, checkpoint_id=f"{folder}/step_{step}")\n'
    Path("train.py").write_text(changed(Path("train.py").read_text(), (saves, "    pass\n")))
    judgement = judged(folder)
    assert judgement.diagnosis is not None
    assert str(judgement.folder.resolve() / "checkpoint") in diagnosis_line(judgement.diagnosis)


def test_the_folder_of_checkpoints_is_that_of_a_launch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(checkpoints.VARIABLE, raising=False)
    with pytest.raises(ValueError, match=checkpoints.VARIABLE):
        checkpoints.folder()
    checkpoints.tell(Path("/there"))
    assert checkpoints.folder() == Path("/there")
    monkeypatch.setenv(checkpoints.VARIABLE, "")  # put back at the end
