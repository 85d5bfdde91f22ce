"""Saving and loading: what was written comes back byte for byte, and damage is named with its remedy."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from literal import tiny_case, trial_of
from literal_reference import reference_of
from same_records import assert_same

from harness.core.evidence import format
from harness.core.evidence.format import fields_digest, version_of
from harness.core.evidence.names import with_reference_names
from harness.core.evidence.records import Collective, Exit, Group, RankEvidence, Resumed, Run, TensorEvidence, Wrapper
from harness.core.evidence.step import Activity, Call, Microbatch, QuantizedMatmul, StepEvidence
from harness.core.evidence.store import EvidenceError, evidence_file, load_run, load_stored, save_run, save_stored
from harness.reference.record import ReferenceRun

SMALL = RankEvidence(
    rank=0,
    world_size=1,
    parameters=(TensorEvidence("w", (2,), "float64", [[0]], ("Shard(0)",), np.array([0.1, -0.0])),),
    groups=(Group("0", (0,), "gloo"),),
    collectives=(),
    steps=(),
)
AWKWARD = {
    "0-dim": np.array(3.5),
    "empty": np.zeros((0, 4)),
    "bool": np.array([True, False, True]),  # three bytes: what follows is not aligned
    "NaN, inf, -0.0": np.array([np.nan, np.inf, -0.0]),
    "int64": np.arange(6).reshape(2, 3),
    "float32": np.array([0.1], np.float32),
    "not contiguous": np.arange(12.0).reshape(3, 4).T,
}


# ---- round trips


def test_everything_a_rank_can_say_comes_back_as_it_was(tmp_path: Path) -> None:
    step = StepEvidence(
        step=1,
        microbatches=(
            Microbatch(np.zeros((1, 4), np.int64), None, None, None),
            Microbatch(np.ones((2, 2), np.int64), np.ones((2, 2), np.int64), 0.1, 3),
        ),
        reported_loss=None,
        grad_norm=float("nan"),
        lr=1e-3,
        gradients=AWKWARD,
        parameters={},
        optimizer_state={"w": {"exp_avg": np.array(2.0)}, "v": {}},
        memory={"parameters": 2**40},
    )
    record = replace(
        SMALL,
        parameters=(
            TensorEvidence("w", (4, 4), "bfloat16", [[0, 1], [2, 3]], ("A", "B"), np.ones((2, 4), "f4")),
            TensorEvidence("v", (), "float64", None, (), np.array(1.0)),
        ),
        collectives=(
            Collective("send", (0, 3), "g", "float64", 8, "forward", 1, 0, peer=3),
            Collective("barrier", (0,), "g", "none", 0, "other", 0, 1),
        ),
        steps=(step,),
        structure={"": Wrapper("ddp", replicate_ranks=(0, 1), parameters=("w",), find_unused_parameters=True)},
        environment={"torch": "2", "umlaut": "ü"},
        fault=False,
    )
    save_stored(tmp_path / "rank.npz", record)
    assert_same(load_stored(tmp_path / "rank.npz", RankEvidence), record)


def test_the_references_account_comes_back_as_it_was(tmp_path: Path) -> None:
    literal = reference_of(tiny_case("single"))
    record = ReferenceRun(**{f.name: getattr(literal, f.name) for f in dataclasses.fields(ReferenceRun)})
    save_stored(tmp_path / "new" / "reference.npz", record)
    assert_same(load_stored(tmp_path / "new" / "reference.npz", ReferenceRun), record)


def test_a_whole_run_comes_back_as_it_was(tmp_path: Path) -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    exits = (Exit(0, "killed", 9, "SIGKILL", "err", "stack", "all_reduce", True, "log"), *trial.run.exits[1:])
    run = replace(trial.run, directory=str(tmp_path), seconds=1.5, fault="a fault", exits=exits)
    save_run(run)
    for rank, record in run.ranks.items():
        save_stored(evidence_file(tmp_path, rank), record)
    assert_same(load_run(tmp_path), run)


def test_saving_again_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "rank.npz"
    save_stored(path, SMALL)
    save_stored(path, replace(SMALL, rank=7))
    assert load_stored(path, RankEvidence).rank == 7
    assert os.listdir(tmp_path) == ["rank.npz"]


# ---- damage

AGAIN = "run the case again"


def refusal(path: Path, kind: type = RankEvidence) -> str:
    with pytest.raises(EvidenceError) as error:
        load_stored(path, kind)
    return str(error.value)


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    assert refusal(tmp_path / "x.npz") == f"{tmp_path}/x.npz: no such file; run the case again"


def test_a_file_truncated_anywhere_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rank.npz"
    save_stored(path, SMALL)
    whole = path.read_bytes()
    for length in range(0, len(whole), 41):
        path.write_bytes(whole[:length])
        message = refusal(path)
        assert message.startswith(f"{path}: damaged (") and message.endswith(f"); {AGAIN}"), message


def test_a_flipped_byte_is_damage_or_changes_nothing(tmp_path: Path) -> None:
    """Every byte of a small file. Some bytes of a zip mean nothing (dates); none may change what is read."""
    path = tmp_path / "rank.npz"
    save_stored(path, SMALL)
    whole, noticed = path.read_bytes(), 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x01]) + whole[place + 1 :])
        try:
            assert_same(load_stored(path, RankEvidence), SMALL)
        except EvidenceError as error:
            noticed += 1
            assert str(error).startswith(f"{path}: ")
    assert noticed > len(whole) / 2


def test_a_record_of_another_kind_or_version_is_named(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "rank.npz"
    save_stored(path, SMALL)
    assert refusal(path, ReferenceRun) == f"{path}: holds RankEvidence, expected ReferenceRun; run the case again"
    for number, age in ((format.FORMAT_VERSION + 1, "an older"), (format.FORMAT_VERSION - 1, "a newer")):
        with monkeypatch.context() as patched:
            patched.setattr(format, "FORMAT_VERSION", number)
            told = refusal(path)
        assert told.startswith(
            f"{path}: written by {age} version of the harness (records {version_of(RankEvidence)}, here "
        )
        assert told.endswith("; run the case again")


def test_a_record_that_gets_a_field_is_another_version_without_anybodys_doing() -> None:
    @dataclasses.dataclass(frozen=True)
    class Inner:
        x: int

    @dataclasses.dataclass(frozen=True)
    class More:
        x: int
        y: dict[str, np.ndarray] | None = None

    def outer(inner: type) -> type:
        return dataclasses.make_dataclass("Outer", [("inners", tuple[inner, ...])])  # type: ignore[valid-type]

    More.__name__ = "Inner"
    assert fields_digest(outer(Inner)) == fields_digest(outer(Inner)) != fields_digest(outer(More))


def test_evidence_of_before_versions_were_told_is_older(tmp_path: Path) -> None:
    path = tmp_path / "rank.npz"
    write_foreign(path, "fields of another version")
    assert "rank.npz: written by an older version of the harness (records 1, here " in refusal(path)


def write_foreign(path: Path, what: str) -> None:
    if what == "a plain array":
        with open(path, "wb") as file:
            np.save(file, np.zeros(3))
    elif what == "text":
        path.write_text("hello", encoding="utf-8")
    elif what == "nothing":
        path.write_bytes(b"")
    elif what == "another npz":
        np.savez(path, a=np.zeros(3))
    elif what == "a pickle":
        path.write_bytes(b"\x80\x04K\x01.")
    elif what == "no record":
        save_header(path, [1, 2])
    elif what == "fields of another version":
        save_header(path, {"format": 1, "type": "RankEvidence", "record": {"rank": 0, "colour": "red"}})
    elif what == "fewer bytes than promised":
        header = {"format": version_of(Microbatch), "type": "Microbatch", "record": {"tokens": ["int64", [99]]}}
        save_header(path, header)


def save_header(path: Path, header) -> None:
    np.savez(path, header=np.frombuffer(json.dumps(header).encode(), np.uint8), blob=np.zeros(0, np.uint8))


@pytest.mark.parametrize(
    "what",
    [
        *("a plain array", "text", "nothing", "another npz", "a pickle", "no record"),
        "fewer bytes than promised",
    ],
)
def test_a_foreign_file_is_damaged_evidence(tmp_path: Path, what: str) -> None:
    path = tmp_path / "rank.npz"
    write_foreign(path, what)
    message = refusal(path, Microbatch if what == "fewer bytes than promised" else RankEvidence)
    assert message.startswith(f"{path}: damaged (") and message.endswith(f"); {AGAIN}"), message


# ---- a run that is not whole


def stored(tmp_path: Path) -> Path:
    trial = trial_of(tiny_case("ddp_2"))
    save_run(replace(trial.run, directory=str(tmp_path)))
    for rank, record in trial.run.ranks.items():
        save_stored(evidence_file(tmp_path, rank), record)
    return tmp_path


def test_a_missing_and_a_damaged_rank_are_told_and_the_others_read(tmp_path: Path) -> None:
    path = evidence_file(stored(tmp_path), 1)
    path.unlink()
    run = load_run(tmp_path)
    assert (list(run.ranks), run.unreadable) == ([0], {})
    path.write_bytes(evidence_file(tmp_path, 0).read_bytes()[:-500])
    run = load_run(tmp_path)
    assert list(run.ranks) == [0]
    assert run.unreadable[1].startswith(f"{path}: damaged (")


def test_a_folder_that_is_no_run_is_answered_with_the_remedy(tmp_path: Path) -> None:
    for folder, remedy in (
        (tmp_path / "other", "`harness check` wants the folder that `harness run` wrote"),
        (tmp_path, "this launch did not end, or still runs; run the case again"),
    ):
        with pytest.raises(EvidenceError) as error:
            load_run(folder)
        assert str(error.value) == f"{folder}/run.json: no such file; {remedy}"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"exits": [{"colour": 1}]}', '{"exits": 3}'])
def test_a_damaged_run_file_is_answered_with_the_remedy(tmp_path: Path, text: str) -> None:
    (stored(tmp_path) / "run.json").write_text(text)
    with pytest.raises(EvidenceError) as error:
        load_run(tmp_path)
    message = str(error.value)
    assert message.startswith(f"{tmp_path}/run.json: damaged (") and message.endswith("); run the case again")


# ---- a full disk


def test_what_was_resumed_is_told_in_the_references_spelling_too() -> None:
    held = Resumed({"lm_head.weight": np.ones(2)}, {"lm_head.weight": {"step": np.array(2.0)}})
    told = with_reference_names(replace(SMALL, resumed=held), lambda name: name.replace("lm_head", "output")).resumed
    assert told is not None
    assert (list(told.parameters), list(told.optimizer_state)) == (["output.weight"], ["output.weight"])
    assert with_reference_names(SMALL, str).resumed is None


def test_counts_by_module_are_told_in_the_references_spelling_too() -> None:
    activity = Activity(
        calls={Call("forward", "blocks.0.q"): 1},
        quantized={QuantizedMatmul("backward", "blocks.0.q", "mxfp8"): 2},
        random={"forward": 3},
        other_states={"blocks.0": 1},
    )
    step = StepEvidence(1, (), None, None, None, {}, {}, {}, {}, activity=activity)
    told = (
        with_reference_names(replace(SMALL, steps=(step,)), lambda name: name.replace("blocks", "layers"))
        .steps[0]
        .activity
    )
    assert told == Activity(
        calls={Call("forward", "layers.0.q"): 1},
        quantized={QuantizedMatmul("backward", "layers.0.q", "mxfp8"): 2},
        random={"forward": 3},
        other_states={"layers.0": 1},
    )


def test_runs_are_values() -> None:
    assert Run("d", 1, (), {}) == Run("d", 1, (), {}, 0.0, {}, None)
