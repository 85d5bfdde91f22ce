"""The command line says what is wrong in one message, exits with a code that scripts can trust, and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import ROOT
from harness.core.case.case import Case
from harness.core.cli import all_commands, main
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Result, Verdict
from harness.core.run.selection import select_matching

PAIR = "cases: {pair: {why: a test, dims: {dp_replicate: 2}}}"
NEW_RECIPE = "cases: {single: {why: a test, training: {steps: 1, seed: 7}}}"

COMMANDS = tuple(all_commands())


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of evidence that `harness run` left, and its exit code and output beside it."""
    folder = tmp_path_factory.mktemp("stored")
    (folder / "cases").mkdir()
    (folder / "cases" / "pair.yaml").write_text(PAIR)
    assert main(["run", "pair", "--cases", str(folder / "cases"), "--out", str(folder / "out")]) == 0
    return folder / "out" / "pair"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cases: {pair: {why: x, dim: {tp: 2}}}", "case 'pair': unknown key 'dim' (did you mean 'dims'?); known: "),
        (
            "cases: {pair: {why: x, dims: {dp_shard: 4, tp: 2}, world_size: 16}}",
            "case 'pair': pp 1 x dp_replicate 1 x dp_shard 4 x cp 1 x tp 2 = 8 ranks, but world_size says 16",
        ),
        ("cases: {pair: {why: x, dims: {tp: 3}}}", "case 'pair': n_heads 8 is not divisible by tp 3"),
        ("cases: {pair: {dims: {tp: 2}}}", "case 'pair': 'why' is missing"),
        ("cases: [", "not valid YAML"),
    ],
)
def test_a_mistake_in_a_case_is_one_message_with_file_case_and_key(
    cases: Any, capsys: Any, text: str, problem: str
) -> None:
    assert main(["run", "pair", *cases(text)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("harness: ") and "some.yaml: " + problem in told.err
    assert "Traceback" not in told.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["run", "hsdp_2x9"],
            "no case is named 'hsdp_2x9' (did you mean 'hsdp_2x2', 'hsdp_2x4' or 'hsdp_2x8'?); `harness matrix",
        ),
        (
            ["plan", "hsdp_2x9"],
            "no case is named 'hsdp_2x9' (did you mean 'hsdp_2x2', 'hsdp_2x4' or 'hsdp_2x8'?); `harness matrix",
        ),
        (
            ["run", "single", "--trainer", "lama"],
            "--trainer: no trainer is named 'lama'; known: deepspeed, llama3, megatron",
        ),
        (["run", "single", "--fault", "nowhere.py:x"], "nowhere.py: no such file; a fault is given as FILE.py:NAME"),
        (["run", "single", "--fault", "nonsense"], "no fault is named 'nonsense'; `harness faults --list` lists them"),
        (["matrix", "-k", "nonsense"], "-k 'nonsense' selects no case; `harness matrix --list` lists them"),
        (
            ["matrix", "-k", "hsdp_2x2_compile and not bf16"],
            "no case of tier default is selected, but 1 of tier compiled; add --tier compiled or --tier all",
        ),
        (["matrix", "-k", "tp and"], "-k 'tp and': expected words joined by and, or, not and parentheses"),
        (
            ["check", "nowhere"],
            "nowhere/case.json: no such file; a folder that `harness run` wrote is wanted",
        ),
    ],
)
def test_what_was_mistyped_is_named(capsys: Any, arguments: list[str], problem: str) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.splitlines()[0][: len("harness: " + problem)]) == ("", "harness: " + problem)
    assert "Traceback" not in told.err


def test_a_usage_error_can_not_be_taken_for_a_failing_check(capsys: Any) -> None:
    assert main(["run"]) == 2
    assert main(["run", "--bisect"]) == 125
    assert main(["run", "no_such_case", "--bisect"]) == 125
    assert main(["run", "single", "--bis"]) == 2  # not read as --bisect by one and not by the other
    assert "harness run: error: unrecognized arguments: --bis (did you mean '--bisect'?)" in capsys.readouterr().err
    assert main(["--nothing", "run", "single"]) == 2
    assert "harness: error: unrecognized arguments: --nothing" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "0", "inf", "nan", "1e400", "1e300", "604801"])
@pytest.mark.parametrize("command", [("run", "single"), ("matrix",), ("run", "--join", "out"), ("preflight", "single")])
def test_a_time_limit_that_no_launch_can_have_is_refused(command: tuple[str, ...], seconds: str, capsys: Any) -> None:
    assert main([*command, "--timeout", seconds]) == 2
    said = capsys.readouterr().err
    assert "argument --timeout: " in said and said.rstrip().endswith(f"got {seconds}")


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").touch()
    assert main(["run", "single", "--out", str(tmp_path / "file" / "out")]) == 2
    assert capsys.readouterr().err == (
        f"harness: {tmp_path}/file/out/.locks: cannot be written: Not a directory; choose another --out\n"
    )


def test_a_full_disk_is_a_message_and_not_a_verdict(tmp_path: Path) -> None:
    """A limit on file sizes stands for the full disk: both fail in the middle of a write. A smaller one is refused before."""
    small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_100_000, 1_100_000))  # noqa: E731
    done = harness("run", "single", "--out", str(tmp_path), preexec_fn=small)
    assert done.returncode == 2
    assert done.stderr.startswith("harness: ") and "File too large" in done.stderr


def test_too_few_file_descriptors_are_a_reason_and_not_a_verdict(tmp_path: Path) -> None:
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))  # noqa: E731
    done = harness("run", "hsdp_2x8", "--out", str(tmp_path), preexec_fn=few)
    assert (done.returncode, done.stderr) == (
        2,
        "harness: skipped, nothing was judged: 16 ranks may need 160 file descriptors each, 100 are allowed;"
        " `ulimit -n 160`\n",
    )


@pytest.mark.slow("real ranks each; the first is read in the same way", after=1)
@pytest.mark.parametrize("unread", ["stdout", "stderr"])
def test_who_stops_reading_changes_no_verdict(stored: Path, tmp_path: Path, unread: str) -> None:
    damaged = shutil.copytree(stored, tmp_path / "damaged")
    (damaged / "case.json").write_text("{")
    for folders, code in (([stored], 0), ([stored, damaged], 2)):
        command = [sys.executable, "-m", "harness", "check", *map(str, folders)]
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.Popen(command, cwd=ROOT, **{unread: writing})  # type: ignore[call-overload]
        os.close(writing)
        assert done.wait() == code


def test_a_disk_too_full_for_the_report_is_a_message(stored: Path) -> None:
    command = [sys.executable, "-m", "harness", "check", str(stored)]
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "harness: what was found cannot be shown: No space left on device\n",
    )


def test_a_damaged_folder_keeps_no_other_from_being_judged(stored: Path, tmp_path: Path, capsys: Any) -> None:
    damaged = shutil.copytree(stored, tmp_path / "damaged")
    (damaged / "case.json").write_text("{")
    assert main(["check", str(damaged), str(stored)]) == 2
    told = capsys.readouterr()
    assert told.out.startswith("PASS pair\n") and f"{damaged}/case.json: damaged" in told.err


@pytest.mark.parametrize(
    "arguments", [["run", "single", "--trainer"], ["faults", "--file"], ["run", "single", "--fault"]]
)
def test_a_file_that_exits_when_it_is_loaded_is_no_pass(tmp_path: Path, capsys: Any, arguments: list[str]) -> None:
    file = tmp_path / "exits.py"
    file.write_text("raise SystemExit(0)")
    of = f"{file}:x" if "--fault" in arguments else str(file)
    assert main([*arguments, of, "--out", str(tmp_path)]) == 2
    assert "cannot be loaded: line 1, `raise SystemExit(0)`: SystemExit(0)" in capsys.readouterr().err


def test_an_unexpected_exception_in_one_case_keeps_the_outcomes_of_all_others(
    cases: Any, monkeypatch: Any, capsys: Any
) -> None:
    def judged(case: Case, options: Any) -> Judgement:
        if case.name == "second":
            raise KeyError("nobody thought of this")
        return Judgement(case, Path("x"), (Result("completed", Verdict.PASS, 1),), None, 1.0)

    monkeypatch.setattr("harness.core.run.matrix.run_case", judged)
    arguments = cases("cases: {first: {why: a test}, second: {why: a test}, third: {why: a test}}")
    assert main(["matrix", "--launcher", "torchrun", *arguments]) == 2
    told = capsys.readouterr().out
    assert told.splitlines()[-1].endswith("s: 2 PASS, 1 ERROR")
    assert "KeyError('nobody thought of this') in judged, " in told


def test_the_version_says_what_a_report_of_a_mistake_begins_with(capsys: Any) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"harness \S.*, commit \S+, records \d+, torch \S+, Python 3\.\S+\n", capsys.readouterr().out)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_terminal_of_80_columns(command: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_cuda_without_gpus_is_skipped_with_the_reason_and_not_green(
    monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr("harness.core.run.supported.count_visible_gpus", lambda: 0)
    reason = "needs 2 GPUs, and 0 are visible; check CUDA_VISIBLE_DEVICES, or leave out --device cuda to run on CPU"
    assert main(["run", "ddp_2", "--device", "cuda", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"harness: skipped, nothing was judged: {reason}\n"
    assert main(["matrix", "-k", "ddp_2", "--device", "cuda", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().out
    assert re.search(rf"^ddp_2_accum +SKIPPED: {re.escape(reason)}$", told, re.MULTILINE)
    assert re.search(r"s: \d+ SKIPPED$", told, re.MULTILINE)


def test_a_missing_golden_is_unknown_and_says_how_to_make_it(cases: Any, capsys: Any) -> None:
    assert main(["run", "single", *cases(NEW_RECIPE), "--bisect"]) == 125
    told = capsys.readouterr().out
    assert re.search(r"golden/\S+: no golden for this recipe; make it with `harness golden --accept .*-k \S+`", told)


def test_a_golden_is_not_accepted_in_ci(cases: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("CI", "true")
    assert main(["golden", "--accept", *cases(NEW_RECIPE)]) == 2
    assert capsys.readouterr().err.startswith("harness: goldens are not accepted in CI")


@pytest.mark.slow("real ranks, three times; tests/core/judge/test_golden.py accepts literals")
def test_accepting_a_golden_succeeds_and_judges_nothing_and_comparing_it_afterwards_is(project: Path) -> None:
    def golden(*arguments: str) -> tuple[int, str]:
        done = harness("golden", *arguments, cwd=project)
        return done.returncode, done.stdout

    file = "debug-adamw-float64-"
    assert golden()[0] == 2
    code, told = golden("--accept")
    assert code == 0 and told.startswith(file)
    assert "accepted, not judged: review `git add -N golden/ && git diff golden/`" in told
    assert golden()[0] == 0
    (path,) = (project / "golden").glob("*.json")
    path.write_text(path.read_text().replace('"loss": ', '"loss": 1'))
    shutil.copy(path, project / "golden" / "old.json")
    code, told = golden()
    assert code == 1 and "step 1, loss: expected 1" in told and "old.json: no case uses it; delete it" in told
    code, told = golden("--accept")
    assert code == 0 and "largest relative difference" in told and " -> " in told


def test_stored_evidence_gets_the_verdict_it_got_when_it_was_made(stored: Path) -> None:
    """Without torch, and without starting anything: an audit hook would refuse."""
    verdict = json.loads((stored / "verdict.json").read_text())
    watch = """
import sys
from harness.core.cli import all_commands, main

def refuse(event, details):
    assert event not in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec"), event
sys.addaudithook(refuse)
code = main(["check", sys.argv[1]])
assert "torch" not in sys.modules
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", watch, str(stored)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("PASS pair\n")
    assert json.loads((stored / "verdict.json").read_text()) == verdict


def test_a_folder_of_case_folders_is_checked_whole(stored: Path, capsys: Any) -> None:
    assert main(["check", str(stored.parent)]) == 0
    assert capsys.readouterr().out.startswith("PASS pair\n")


def test_a_corrupt_evidence_file_is_named_and_no_pass(stored: Path, tmp_path: Path, capsys: Any) -> None:
    copy = shutil.copytree(stored, tmp_path / "copy")
    rank = copy / "run" / "ranks" / "rank_01.npz"
    rank.write_bytes(rank.read_bytes()[: rank.stat().st_size // 2])
    assert main(["check", str(copy)]) == 2  # the trainer did not damage it
    assert f"{rank}: damaged (" in capsys.readouterr().out
    (copy / "reference.npz").write_bytes(b"nonsense")
    assert main(["check", str(copy)]) == 2
    assert capsys.readouterr().err.startswith(f"harness: {copy}/reference.npz: damaged (")


@pytest.mark.parametrize(
    ("folder", "more"), [("my cases", ["--trainer", "a trainer.py"]), ("my cases", ["--seed", "3"]), ("cases", [])]
)
def test_the_command_that_runs_it_again_is_one_that_does(
    cases: Any, tmp_path: Path, capsys: Any, folder: str, more: list[str]
) -> None:
    """From the folder that it was typed in and, with another one of cases, seed, trainer and fault, as it was."""
    cases(PAIR)
    (tmp_path / "cases").rename(tmp_path / folder)
    (tmp_path / "my faults").mkdir()
    (tmp_path / "wrong.py").rename(tmp_path / "my faults" / "wrong.py")
    shutil.copy(ROOT / "tests" / "own_trainer.py", tmp_path / "a trainer.py")
    typed = ["run", "pair", "--cases", folder, "--fault", "my faults/wrong.py:fatal", "--timeout", "60"]
    assert main([*typed, *more]) == 1
    told = capsys.readouterr().out
    (again,) = re.findall(r"^  again +harness (.*)$", told, re.MULTILINE)
    (evidence,) = re.findall(r"^  evidence +(.*)$", told, re.MULTILINE)
    first = (tmp_path / evidence / "case.json").read_text()
    shutil.rmtree(tmp_path / "out" / Path(evidence).name)
    assert main(shlex.split(again)) == 1
    assert (tmp_path / evidence / "case.json").read_text() == first
    assert f"harness {again}" in capsys.readouterr().out


def test_torchrun_arguments_of_another_number_of_ranks_are_refused_before_the_launch(cases: Any, capsys: Any) -> None:
    typed = ["run", "pair", *cases(PAIR), "--launcher", "torchrun"]
    assert main([*typed, "--torchrun-args", "--nnodes 2 --nproc-per-node 2"]) == 2
    assert "start 4 ranks" in capsys.readouterr().err and not Path("out").exists()


def test_a_fault_that_did_not_fire_proves_nothing(cases: Any, capsys: Any) -> None:
    assert main(["run", "pair", *cases(PAIR), "--fault", "wrong.py:silent"]) == 2
    assert "UNFIRED" in capsys.readouterr().out


def test_a_failing_check_exits_with_1_also_under_bisect(cases: Any, capsys: Any) -> None:
    assert main(["run", "pair", *cases(PAIR), "--fault", "wrong.py:fatal", "--bisect"]) == 1
    assert "on purpose" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "hsdp_2x8"], ["matrix", "--list"]])
def test_what_needs_no_ranks_imports_no_torch(arguments: list[str]) -> None:
    watch = "import sys; from harness.core.cli import main; code = main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", watch, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_words_of_another_command_ask_for_nothing(tmp_path: Path, capsys: Any) -> None:
    assert main(["record", "-o", str(tmp_path), "--no-such", "--", "python", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_a_selection_reads_as_in_pytest() -> None:
    cases = [Case("hsdp_2x2", "x"), Case("hsdp_2x2_sgd", "x"), Case("tp_2", "x")]

    def names(expression: str) -> list[str]:
        return [case.name for case in select_matching(cases, expression)]

    assert names("HSDP and not sgd") == ["hsdp_2x2"]
    assert names("tp or (sgd and 2x2)") == ["hsdp_2x2_sgd", "tp_2"]
    assert names("") == ["hsdp_2x2", "hsdp_2x2_sgd", "tp_2"]


# ---- processes


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the harness with one case and no golden: what is accepted there is nobody's golden."""
    shutil.copytree(ROOT / "harness", tmp_path / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "some.yaml").write_text(NEW_RECIPE)
    return tmp_path


def harness(*arguments: str, cwd: Path = ROOT, **how: Any) -> subprocess.CompletedProcess[str]:
    """Under a limit on file sizes Python would leave truncated bytecode beside the sources, for every later process."""
    environment = {**os.environ, "CI": "", "PYTHONPATH": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "harness", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, **how)
