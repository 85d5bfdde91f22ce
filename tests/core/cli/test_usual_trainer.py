"""Which trainer a command is about where none is typed: that of the repository, or exit code 2. No rank is started."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import ROOT
from harness.core.case import usual_trainer
from harness.core.case.case import Case
from harness.core.case.trainer_spec import CHECKOUT_FOLDER
from harness.core.cli import main
from harness.core.cli.work import check, options
from harness.core.cli.work import run as run_command
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Result, Verdict
from harness.core.plugin import checks
from harness.core.run.options import Options
from harness.faults.attempt import Attempt, Outcome
from harness.faults.cli.work import faults as faults_command

CASES = "cases: {single: {why: a test}}"
IN_PYPROJECT = '[tool.pytest.ini_options]\nharness_trainer = "{}"\n'


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody's, with cases and an adapter below a folder, which its pyproject.toml names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "some.yaml").write_text(CASES)
    adapter(tmp_path / "adapters" / "mine.py")
    (tmp_path / "pyproject.toml").write_text(IN_PYPROJECT.format("adapters/mine.py"))
    return tmp_path


def adapter(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text((ROOT / "tests" / "own_trainer.py").read_text())
    return path


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The trainers that commands would have run."""
    found: list[str] = []

    def judged(case: Case, how: Options, _: Any = None) -> Judgement:
        found.append(how.trainer)
        return Judgement(case, Path("x"), (Result("loss", Verdict.PASS, 1),), None, 1.0, trainer=how.trainer)

    def tried(chosen: Any, control: Any, args: argparse.Namespace) -> tuple[list[Attempt], Attempt, float]:
        found.append(options.run_options_of(args).trainer)
        ended = SimpleNamespace(outcome=Outcome.MISSED)
        return [], ended, 0.0  # type: ignore[return-value]

    monkeypatch.setattr(run_command, "run_case", judged)
    monkeypatch.setattr("harness.core.run.matrix.run_case", judged)
    monkeypatch.setattr(faults_command, "try_faults", tried)
    monkeypatch.setattr(faults_command.shown, "report_text", lambda *_: "")
    return found


RUN, MATRIX = ["run", "single"], ["matrix", "--launcher", "torchrun"]
NIGHT = ["nightly", "nights", "--launcher", "torchrun", "--minutes", "0"]


@pytest.mark.parametrize("command", [RUN, MATRIX, NIGHT])
def test_each_command_is_about_the_trainer_that_the_configuration_names(
    repository: Path, used: list[str], command: list[str], capsys: Any
) -> None:
    assert main(command) == 0
    assert used == [str(repository / "adapters" / "mine.py")]
    assert main([*command, "--trainer", "llama3"]) == 0
    assert used[1:] == ["llama3"]  # what is typed counts


def test_the_configuration_is_found_from_a_folder_below(
    repository: Path, used: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository / "adapters")
    assert main([*RUN, "--cases", "../cases"]) == 0
    assert used == [str(repository / "adapters" / "mine.py")]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pytest.ini", "[pytest]\nharness_trainer = adapters/mine.py\n"),
        ("tox.ini", "[pytest]\nharness_trainer = adapters/mine.py\n"),
        ("setup.cfg", "[tool:pytest]\nharness_trainer = adapters/mine.py\n"),
        ("pytest.toml", '[pytest]\nharness_trainer = "adapters/mine.py"\n'),
        ("pyproject.toml", '[tool.pytest]\nharness_trainer = "adapters/mine.py"\n'),
    ],
)
def test_every_file_that_pytest_reads_may_name_it(repository: Path, file: str, text: str) -> None:
    (repository / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (repository / file).write_text(text)
    assert usual_trainer.default_trainer().name == str(repository / "adapters" / "mine.py")


@pytest.mark.parametrize(
    "text",
    [
        IN_PYPROJECT.format("adapters/gone.py"),
        IN_PYPROJECT.format("lama"),
        IN_PYPROJECT.format(""),
        "[tool.pytest.ini_options]\nharness_trainer = 3\n",
        "[tool.pytest.ini_options\n",
        '[tool]\npytest = "x"\n',
    ],
)
@pytest.mark.parametrize("command", [RUN, MATRIX, NIGHT, ["doctor"], ["bisect", "--over", "torch==1,2"]])
def test_a_configuration_that_names_none_is_no_verdict_on_another(
    repository: Path, used: list[str], command: list[str], text: str, capsys: Any
) -> None:
    (repository / "pyproject.toml").write_text(text)
    assert main(command) == 2
    told = capsys.readouterr().err
    assert used == [] and told.startswith("harness: --trainer: ") and "Traceback" not in told


def test_the_one_adapter_of_the_folder_is_meant_and_of_several_none(
    repository: Path, used: list[str], capsys: Any
) -> None:
    (repository / "pyproject.toml").write_text("")
    assert main(RUN) == 0
    mine = adapter(repository / "my_adapter.py")
    assert main(RUN) == 0
    assert used == ["llama3", str(mine)]
    assert capsys.readouterr().out.endswith("judged was my_adapter.py, the only adapter of this folder\n")
    adapter(repository / "adapter.py")
    for command in (RUN, MATRIX, NIGHT, ["doctor"]):
        assert main(command) == 2
    assert len(used) == 2


def test_the_catalogue_of_this_project_is_made_in_its_own_trainer_and_another_in_the_repositorys(
    repository: Path, used: list[str]
) -> None:
    told = "breaks='x', bug='x', case='single', caught_by='loss', named='', does=print"
    (repository / "own.py").write_text(f"from harness.faults import fault\nnone = fault({told})\n")
    main(["faults", "-k", "hsdp_runs_as_fsdp"])
    main(["faults", "--file", "own.py"])
    assert used == ["llama3", str(repository / "adapters" / "mine.py")]


def test_stored_evidence_of_another_trainer_is_named_as_that(
    repository: Path, monkeypatch: pytest.MonkeyPatch, used: list[str], capsys: Any
) -> None:
    def stored(trainer: str) -> str:
        judgement = Judgement(Case("x", ""), Path("x"), (Result("loss", Verdict.PASS, 1),), None, 1.0, trainer=trainer)
        monkeypatch.setattr(check, "judge_folder", lambda _: judgement)
        monkeypatch.setattr(check, "store_report", lambda _: None)
        assert main(["check", "x"]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    assert stored("llama3").startswith("judged was llama3, not adapters/mine.py")
    assert not stored(str(repository / "adapters" / "mine.py")).startswith("judged was")
    assert main([*MATRIX, "--trainer", "llama3"]) == main(["report", "out"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("judged was llama3, not adapters/mine.py")


def test_the_plugin_takes_the_same_trainer(repository: Path) -> None:
    def config(written: str) -> Any:
        return SimpleNamespace(
            getoption=lambda _: None, getini=lambda _: written, inipath=repository / "pyproject.toml"
        )

    assert checks.trainer_of_config(config("adapters/mine.py")) == usual_trainer.default_trainer().name
    assert checks.trainer_of_config(config("megatron")) == "megatron"
    (repository / "pyproject.toml").unlink()
    adapter(repository / "adapter.py")
    assert checks.trainer_of_config(config("")) == "adapter.py"


def test_what_is_typed_to_run_it_again_selects_the_same_trainer(repository: Path) -> None:
    mine = str(repository / "adapters" / "mine.py")
    assert usual_trainer.trainer_arguments(mine) == []
    assert usual_trainer.trainer_arguments(str(repository / "out" / CHECKOUT_FOLDER / "adapters" / "mine.py")) == []
    assert usual_trainer.trainer_arguments("llama3") == ["--trainer", "llama3"]
    (repository / "pyproject.toml").unlink()
    assert usual_trainer.trainer_arguments(mine) == ["--trainer", "adapters/mine.py"]  # from the root of the repository
    assert usual_trainer.trainer_arguments("llama3") == []


def test_the_action_leaves_the_trainer_to_the_repository() -> None:
    import yaml

    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert action["inputs"]["trainer"]["default"] == ""
    (words,) = [step["run"] for step in action["runs"]["steps"] if "harness matrix" in step.get("run", "")]
    assert 'if [ -n "$TRAINER" ]; then words+=(--trainer "$TRAINER"); fi' in words


@pytest.mark.parametrize("command", [["check", "x"], ["report", "out"]])
def test_stored_evidence_is_not_judged_where_the_configuration_cannot_be_read(
    repository: Path, monkeypatch: pytest.MonkeyPatch, used: list[str], command: list[str], capsys: Any
) -> None:
    judgement = Judgement(Case("x", ""), Path("x"), (Result("loss", Verdict.PASS, 1),), None, 1.0)
    monkeypatch.setattr(check, "judge_folder", lambda _: judgement)
    assert main([*MATRIX, "--trainer", "llama3"]) == 0
    (repository / "pyproject.toml").write_text(IN_PYPROJECT.format("adapters/gone.py"))
    capsys.readouterr()
    assert main(command) == 2
    assert "adapters/gone.py" in capsys.readouterr().err
