"""`--json` of each command: one document on stdout, valid, with the exit code that the text has. Hardly a rank is started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from json_documents import SCHEMA, valid
from literal import tiny_case, trial_of
from literal_dumps import save_dumps
from literal_recording import hsdp
from literal_traces import ddp_step, save_job

from harness import ROOT, __version__
from harness.adapters.onboarding.examination import Examination
from harness.clusters.chosen import ChosenRanks
from harness.clusters.commands import CommandRun
from harness.clusters.judging import Verdicts
from harness.clusters.launches import LoneRun
from harness.clusters.lone_rank import RankUsage
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.checks import judge
from harness.core.cli import all_commands, main, make_parser
from harness.core.evidence.records import OwnCalls, OwnGroup
from harness.core.judge.finding import Finding
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Result, Verdict
from harness.core.launch import LaunchError
from harness.faults.attempt import METHODS, Attempt
from harness.faults.attempt import Outcome as FaultOutcome
from harness.nights.bisect.search import JudgedRevision, SearchResult
from harness.recording.judged.stored_recording import Recording
from harness.recording.judged.structure import structure
from harness.recording.sketches import BUCKETS, GRADIENT, WEIGHTS, RankSketches, Sketch, save_sketches, sketch_file
from harness.recording.traces.analyzer import Analysis

COMMANDS = tuple(all_commands())

ONE = "cases: {one: {why: a test}}"
FOUR = "cases: {a: {why: a test}, b: {why: a test}, c: {why: a test}, d: {why: a test}}"
WITHOUT = {"init"}
SHOWN: dict[str, Any] = {"parts": ("Model",), "placements": {"Replicate over 2, Shard(0) over 2": 3}, "shown": 2}

HEAD = {"harness": __version__, "schema": 1, "document": "case"}

Answer = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def answer(capsys: Any) -> Answer:
    """Runs a command with --json; answers its exit code and its document, which is of that kind and valid."""

    def run(kind: str, *words: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = main([words[0], "--json", *words[1:]])
        told = capsys.readouterr()
        return code, valid(told.out, kind)

    return run


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """No case is run: those that are named so fail a check."""

    def broken(names: str) -> None:
        def run(case: Case, options: Any, _: Any = None) -> Judgement:
            finding = Finding.at(1, 2.0, float("nan"), check="loss", step=2)
            wrong = Result("loss", Verdict.FAIL, 1, (finding,))
            result = wrong if case.name in names else Result("loss", Verdict.PASS, 1)
            return Judgement(case, Path("x"), (result,), None, 1.0, trainer=options.trainer)

        monkeypatch.setattr("harness.core.run.matrix.run_case", run)
        monkeypatch.setattr("harness.core.cli.work.run.run_case", run)

    return broken


def recording(**changed: Any) -> Recording:
    return Recording(Path("run"), {rank: hsdp(rank, **SHOWN | changed) for rank in range(4)})


def test_every_command_has_it_but_those_that_answer_nothing_of_a_job() -> None:
    top = make_parser()
    commands = next(action for action in top._actions if action.choices and "run" in action.choices)
    assert isinstance(commands.choices, dict)
    for one in commands.choices.values():
        one.add_options()
    have = {name for name, one in commands.choices.items() if "--json" in one._option_string_actions}
    assert have == set(COMMANDS) - WITHOUT


def test_a_case_that_runs_and_the_files_beside_its_evidence(cases: Any, answer: Answer) -> None:
    """One rank, which is started."""
    code, said = answer("case", "run", "one", *cases(ONE), "--trainer", "llama3")
    assert (code, said["verdict"], said["folder"]) == (0, "PASS", "out/one")
    beside = valid((Path("out/one/verdict.json")).read_text().replace("\n", "") + "\n", "case")
    assert beside == {name: value for name, value in said.items() if name not in ("folder", "again")}
    code, again = answer("cases", "check", "out")
    assert (code, [HEAD | one for one in again["cases"]]) == (0, [said])
    code, drawn = answer("cases", "report", "out/one")
    assert code == 0 and Path(drawn["cases"][0]["picture"]).is_file()
    shutil.copytree("out/one", "out/other")
    Path("out/other/reference.npz").write_bytes(b"nonsense")
    code, both = answer("cases", "check", "out/one", "out/other")
    assert (code, len(both["cases"]), len(both["unread"])) == (2, 1, 1)
    shutil.rmtree("out/other")
    shutil.rmtree("out/one/run")
    code, said = answer("error", "check", "out")
    assert (code, said["exit"]) == (2, 2) and said["message"]


def test_a_matrix_its_report_its_history_and_its_night(cases: Any, judged: Any, answer: Answer) -> None:
    where, how = cases(FOUR), ["--launcher", "torchrun", "-j", "1", "--trainer", "llama3"]
    judged("")
    assert answer("matrix", "matrix", *where, *how)[0] == 0
    judged("bc")
    code, said = answer("matrix", "matrix", *where, *how)
    assert (code, {one["case"]: one["verdict"] for one in said["outcomes"]}) == (
        1,
        {"a": "PASS", "b": "FAIL", "c": "FAIL", "d": "PASS"},
    )
    (found,) = said["outcomes"][1]["results"]
    assert (found["findings"][0]["ranks"], found["findings"][0]["observed"]) == ([1], "nan")
    code, reported = answer("matrix", "report", "out")
    assert (code, reported["outcomes"]) == (1, said["outcomes"])
    assert answer("matrix", "report", "out")[1]["lacking"] == []
    code, told = answer("history", "report", "--history", "out")
    (series,) = told["series"]
    assert code == 1
    assert {(one["case"], one["state"]) for one in series["changes"]} == {
        (case, state) for case in "bc" for state in ("broken", "flaky")
    }
    code, night = answer("nightly", "nightly", "nights", "--of", "out", "--minutes", "0", *where, "--trainer", "llama3")
    assert code == 1 and Path(night["page"]).is_file()
    assert {one["case"] for one in night["series"][0]["changes"]} == {"b", "c"}


def test_two_runs_compared(cases: Any, judged: Any, answer: Answer) -> None:
    where, how = cases(FOUR), ["--launcher", "torchrun", "-j", "1", "--trainer", "llama3"]
    for broken in ("", "b"):
        judged(broken)
        main(["matrix", *where, *how, "--out", f"out{broken}"])
    code, said = answer("comparison", "compare", "out", "outb")
    differ = {one["case"]: {tuple(each["where"]) for each in one["found"]} for one in said["cases"] if one.get("found")}
    assert (code, said["of"], differ) == (1, "runs", {"b": {("verdict",), ("checks", "loss")}})
    assert answer("comparison", "compare", "out", "out")[0] == 2  # no evidence lies there


def test_faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Answer) -> None:
    def attempt(name: str, outcome: FaultOutcome) -> Attempt:
        return Attempt(
            name, "M01 x", "mesh", True, "pair", outcome, "why", ("x",), ("loss",), dict.fromkeys(METHODS, False), 0.1
        )

    done = [attempt("one", FaultOutcome.CAUGHT), attempt("other", FaultOutcome.OTHERWISE)]
    tried = (done, attempt("control", FaultOutcome.MISSED), 2.0)
    monkeypatch.setattr("harness.faults.cli.work.faults.try_faults", lambda *_: tried)
    code, said = answer("faults", "faults", "--out", str(tmp_path))
    assert (code, [one["outcome"] for one in said["attempts"]]) == (1, ["CAUGHT", "CAUGHT OTHERWISE"])


def test_goldens(cases: Any, monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    finding = Finding(check="golden", step=1, quantity="loss", expected=1.0, observed=2.0)
    monkeypatch.setattr(
        "harness.core.cli.work.golden._against_golden", lambda *_: Result("golden", Verdict.FAIL, 1, (finding,))
    )
    code, said = answer("golden", "golden", *cases(ONE))
    assert (code, said["goldens"][0]["result"]["findings"][0]["step"]) == (1, 1)


def test_a_recording_its_layout_and_what_is_odd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/recording.json").touch()
    monkeypatch.setattr("harness.recording.cli.work.recording_report.load_recording", lambda _: recording())
    code, said = answer("recording", "report", "run")
    assert (code, said["odd"], said["left_evidence"]) == (0, [], [0, 1, 2, 3])
    assert said["structure"]["axes"] and said["facts"]
    results = (Result("traffic", Verdict.FAIL, 1, (Finding.at(1, 2, 3, check="traffic"),)),)
    monkeypatch.setattr("harness.recording.cli.work.recording_report.judge_recording", lambda *_: (results, None))
    code, said = answer("layout", "report", "run", "--layout", "dp_replicate=2,dp_shard=2")
    assert (code, said["verdict"], said["layout"]["dp_shard"]) == (1, "FAIL", 2)
    assert [(one["verdict"], one["world"]) for one in said["jobs"]] == [("FAIL", 4)]
    odd = recording(contents={1: 5}, not_finite={2: ("w",)})
    odd.summaries[3] = hsdp(3, **SHOWN, contents={1: 99})
    monkeypatch.setattr("harness.recording.cli.work.recording_report.load_recording", lambda _: odd)
    code, said = answer("recording", "report", "run")
    rows = {one["label"]: one for one in said["odd"]}
    assert (code, rows["NOT FINITE"]["ranks"], rows["NOT FINITE"]["step"]) == (1, [0, 1, 2], 2)
    moved = (OwnCalls("allreduce", "float32", "other", 1, 2, 8),)
    own = recording(own_groups=(OwnGroup("ProcessGroupGloo", "train.py:3", 0, 0, None, 2, moved),))
    both = replace(own, others=(replace(own, directory=Path("run/jobs/2"), job="second"),))
    monkeypatch.setattr("harness.recording.cli.work.recording_report.load_recording", lambda _: both)
    _, said = answer("recording", "report", "run")
    assert [(one["rank"], one["made"], one["calls"][0]["bytes"]) for one in said["own_groups"]][0] == (
        0,
        "train.py:3",
        8,
    )
    assert [(one["name"], one["directory"], "verdict" in one) for one in said["jobs"]][1] == (
        "second",
        "run/jobs/2",
        False,
    )
    monkeypatch.setattr(
        "harness.recording.cli.work.recording_report.load_recording",
        lambda _: Recording(Path("run"), {}, nothing="no torch"),
    )
    code, said = answer("recording", "report", "run")
    assert (code, said["odd"][0]["label"], said["structure"]) == (2, "NO EVIDENCE", {})


def test_a_command_that_is_recorded_prints_to_stderr(tmp_path: Path) -> None:
    words = ["record", "--json", "-o", str(tmp_path / "r"), "--", sys.executable, "-c", "print('of the command')"]
    done = subprocess.run([sys.executable, "-m", "harness", *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, valid(done.stdout, "recording")["left_evidence"]) == (2, [])
    assert "of the command" in done.stderr


def test_two_recordings_of_one_training(tmp_path: Path, answer: Answer) -> None:
    place, sums = "0:2|0:2", np.arange(BUCKETS, dtype=float)
    for name, times in (("one", 1.0), ("other", 0.5)):
        found = [Sketch(step, WEIGHTS, "w", place, 4, 1.0, sums + 1e-3 * step) for step in (0, 1)]
        found.append(Sketch(1, GRADIENT, "w", place, 4, 1.0, times * sums))
        left = RankSketches(
            0, 1, shapes={"w": (2, 2)}, dtypes={"w": "float32"}, sketches=tuple(found), passes={1: ((7,),)}
        )
        save_sketches(sketch_file(tmp_path / name, 0), left)
        (tmp_path / name / "recording.json").write_text(json.dumps({"code": 0, "same_as": "one"}))
    folders = (str(tmp_path / "one"), str(tmp_path / "other"))
    code, said = answer("same_training", "compare", "--numbers", *folders)
    assert (code, said["verdict"], said["cause"]["kind"]) == (1, "FAIL", "gradients scaled")
    code, said = answer("comparison", "compare", *folders)
    assert (code, said["of"], said["numbers"]["verdict"]) == (1, "structure", "FAIL")
    code, said = answer("comparison", "compare", "--structure", *folders)
    assert (code, "numbers" in said) == (2, False)  # no rank left a record of structure


def test_layouts_that_fit(answer: Answer) -> None:
    code, said = answer("layouts", "plan", "--model", "8B", "--world", "16", "--gpu-memory", "80")
    assert (code, said["world"], said["layouts"][0]["dims"]["tp"] in (1, 2, 4, 8)) == (0, 16, True)


def test_snapshots_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    monkeypatch.chdir(tmp_path)
    kept = structure(recording())
    Path("a.yaml").write_text(yaml.safe_dump(kept))
    Path("b.yaml").write_text(yaml.safe_dump(kept | {"optimizers": "SGD"}))
    code, said = answer("comparison", "compare", "a.yaml", "b.yaml")
    assert (code, said["of"], said["differences"]) == (1, "structure", [{"where": ["optimizers"], "other": "SGD"}])
    assert main(["compare", "a.yaml", "a.yaml", "--json"]) == 0  # behind its words as well
    monkeypatch.setattr("harness.nights.cli.work.compare.load_recording", lambda _: recording())
    assert answer("comparison", "compare", "a.yaml", "run")[0] == 0
    assert answer("error", "compare", "none.yaml", "run")[0] == 2
    assert answer("error", "compare", "c.yaml", "run", "--accept")[0] == 2
    assert not Path("c.yaml").exists()
    assert main(["compare", "run", "c.yaml", "--accept"]) == main(["compare", "a", "b", "--accept"]) == 2
    assert main(["compare", "--with", "run", "--accept", "--", "true"]) == 2
    assert main(["compare", "c.yaml", "run", "--accept"]) == 0
    assert yaml.safe_load(Path("c.yaml").read_text()) == yaml.safe_load(Path("a.yaml").read_text())


@pytest.mark.parametrize("of", [["hsdp_2x2"], ["pp_2_fsdp_2"], ["--dims", "pp=2,dp_shard=64,tp=8", "--model", "8B"]])
def test_plans(of: list[str], answer: Answer) -> None:
    code, said = answer("plan", "plan", *of)
    every = sorted(rank for kind in said["kinds"] for rank in kind["ranks"])
    assert (code, every) == (0, list(range(said["world"])))
    assert bool(said["slices"]) == (said["world"] <= 64)
    assert bool(said["pipeline"]) == (said["dims"]["pp"] > 1)


def verdicts() -> Verdicts:
    case = tiny_case("hsdp_2x2")
    trial = trial_of(case, tiny_case(ParallelDims(dp_shard=4)))
    results = judge(trial)
    return Verdicts(trial, results, diagnose(trial, results))


def test_a_preflight_of_a_case_and_of_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    found = verdicts()
    flown = LoneRun(found.trial.run, (0, 3), 2.0, {0: RankUsage(1.0, 2, 3, "backward", 4)}, {3: "it cannot"})
    monkeypatch.setattr("harness.clusters.cli.work.preflight.run_lone_ranks", lambda *_, **__: flown)
    monkeypatch.setattr("harness.clusters.cli.work.preflight.judge_lone_ranks", lambda *_: found)
    where = ["--out", str(tmp_path), "--trainer", "llama3", "--ranks", "0,3"]
    code, said = answer("preflight", "preflight", "hsdp_2x2", *where)
    assert (code, said["verdict"], [one["rank"] for one in said["ran"]]) == (1, "FAIL", [0, 3])
    assert said["ran"][1]["unable"] == "it cannot" and said["figures"]["neediest"]["most"] > 0
    ran = CommandRun(tmp_path, {0: 0, 3: 1}, {}, {}, 1.0)
    monkeypatch.setattr("harness.clusters.commands.run_command_alone", lambda *_: ran)
    monkeypatch.setattr("harness.clusters.commands.judge_command", lambda *_: found)
    monkeypatch.setattr("harness.clusters.cli.work.preflight.choose_ranks", lambda *_: ChosenRanks({"x": (0, 3)}, 0))
    layout = ["--layout", "dp_replicate=2,dp_shard=2", "--world", "4"]
    code, said = answer("preflight", "preflight", *layout, "--out", str(tmp_path), "--", "python", "train.py")
    assert (code, said["command"], said["ran"][1]) == (1, ["python", "train.py"], {"rank": 3, "code": 1})


def test_bisecting(cases: Any, monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    bad = JudgedRevision(
        "b" * 40, "", "", "bad", frozenset({("one", "loss")}), {"one": "why"}, folders={"one": Path("none")}
    )
    good = JudgedRevision("a" * 40, "", "", "good", folders={"one": Path("none")})
    found = SearchResult(bad, good, (good, bad), (), 3.0)
    monkeypatch.setattr("harness.nights.bisect.commits.bisect_commits", lambda *_: found)
    words = ["--repo", ".", "--good", "a", "--bad", "b", *cases(ONE), "--trainer", "llama3"]
    code, said = answer("bisect", "bisect", *words)
    assert (code, said["first"]["broken"], said["before"]["verdict"]) == (0, [["one", "loss"]], "good")
    assert said["side_by_side"][0]["case"] == "one" and said["side_by_side"][0]["problem"]
    monkeypatch.setattr("harness.nights.bisect.side_by_side.load_trial", lambda _: trial_of(tiny_case("fsdp_2")))
    (seen,) = answer("bisect", "bisect", *words)[1]["side_by_side"]
    assert seen["before"] == seen["first"] and seen["first"]["it shards over"] == "[0,1]"
    monkeypatch.setattr(
        "harness.nights.bisect.commits.bisect_commits", lambda *_: SearchResult(None, None, (good,), ("x",), 1.0)
    )
    assert answer("bisect", "bisect", *words)[0] == 2


def test_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    monkeypatch.chdir(tmp_path)
    Path("adapter.py").write_text((ROOT / "tests" / "own_trainer.py").read_text())

    def examine(cases: Any, options: Any, tell: Any, judged: Any) -> Examination:
        tell("cause", "it is so")
        judgement = Judgement(cases[0], Path("x"), (Result("loss", Verdict.FAIL, 1),), None, 1.0)
        return Examination({cases[0].name: Verdict.FAIL}, stopped=True, judgements=(judgement,))

    monkeypatch.setattr("harness.adapters.cli.work.doctor.examine", examine)
    code, said = answer("doctor", "doctor", "--cases", "builtin", "-k", "single")
    assert (code, said["judged"], said["cases"][0]["verdict"]) == (1, {said["cases"][0]["case"]: "FAIL"}, "FAIL")
    assert said["lines"][-1] == {"label": "cause", "text": "it is so"}


# ---- what ends without an answer


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "no_such_case"],
        ["plan", "hsdp_2x2", "--no-such-option"],
        ["report", "nowhere"],
        ["show", "nowhere"],
        ["check", "nowhere"],
        ["compare", "a"],
        ["matrix", "--list"],
        ["matrix", "--all"],
        ["faults", "--list"],
        ["golden", "--accept"],
        ["golden", "--plot"],
        ["report", "nowhere", "--html", "x.html"],
        ["bisect", "--trainer", "llama3"],
        ["record"],
    ],
)
def test_what_cannot_be_done_is_a_document_too(words: list[str], answer: Answer) -> None:
    code, said = answer("error", *words)
    assert (code, said["exit"]) == (2, 2) and said["message"]


def test_what_is_raised_on_the_way_is_one_document(cases: Any, monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    where = cases(ONE)

    def raises(error: BaseException) -> tuple[int, dict[str, Any]]:
        def run(*_: Any) -> Any:
            print("of a library")
            os.write(1, b"of C\n")
            raise error

        monkeypatch.setattr("harness.core.cli.work.run.run_case", run)
        return answer("error", "run", "one", *where, "--trainer", "llama3")

    for error, code in ((LaunchError("no"), 2), (KeyError("x"), 2), (SystemExit(0), 2), (KeyboardInterrupt(), 130)):
        ended, said = raises(error)
        assert (ended, said["exit"]) == (code, code) and said["message"]


def test_a_bisecting_script_gets_the_code_that_the_document_says(cases: Any, answer: Answer) -> None:
    code, said = answer("error", "run", "none", "--bisect", *cases(ONE))
    assert (code, said["exit"]) == (125, 125)


def test_report_of_traces_and_of_dumps(answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own analyzer is not run here."""
    folder = save_job(tmp_path / "traces", ddp_step, world=2, shards=1)
    code, told = answer("traces", "report", str(folder), "--layout", "dp_replicate=2")
    assert (code, told["verdict"], told["traced"], told["layout"]["dp_replicate"]) == (0, "PASS", [0, 1], 2)
    monkeypatch.setattr("harness.recording.cli.work.trace_report.analysis_of", lambda dumps: Analysis((1,)))
    done = ("all_reduce", 100, "0", "completed")
    folder = save_dumps(tmp_path / "dumps", {0: [done, ("all_reduce", 100)], 1: [done]})
    code, told = answer("dumps", "report", str(folder))
    assert (code, told["verdict"], [one["rank"] for one in told["blamed"]]) == (1, "FAIL", [1])
    assert (told["waits"][0]["behind"], told["analyzer"]["agrees"]) == ([1], True)


def test_every_kind_of_document_is_tried_here() -> None:
    kinds = {one["properties"]["document"]["const"] for one in SCHEMA["oneOf"]}
    here = Path(__file__).read_text(encoding="utf-8")
    assert [kind for kind in kinds if f'answer("{kind}"' not in here] == []
