"""What a checkpoint holds: its index is read, and judged against what trained."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from literal import ADAMW, SGD, TINY, cause_of, judged, tiny_case, trial_of

from harness.core.case.case import Saved
from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.checks import judge
from harness.core.evidence.checkpoint_index import Checkpoint, SavedTensor, read_checkpoint_index
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.run import rank_main

WEIGHT = "layers.0.attention.wq.weight"


def saving(**changes: Any) -> Trial:
    """The launch that saves, of two."""
    case = tiny_case("fsdp_2", resume=(Saved(2, ParallelDims(dp_shard=2)),), **changes)
    return trial_of(case).saved[0]


def with_tensors(trial: Trial, change: Callable[[SavedTensor], list[SavedTensor]]) -> Trial:
    held = trial.run.checkpoint
    assert held is not None
    tensors = tuple(new for tensor in held.tensors for new in change(tensor))
    return replace(trial, run=replace(trial.run, checkpoint=replace(held, tensors=tensors)))


def with_checkpoint(trial: Trial, **changes: Any) -> Trial:
    held = trial.run.checkpoint
    assert held is not None
    return replace(trial, run=replace(trial.run, checkpoint=replace(held, **changes)))


def is_named(trial: Trial) -> bool:
    """The launch is told, and the first finding of the check, which is all that is known."""
    found = diagnose(trial, judge(trial))
    assert cause_of(found) and found is not None
    first = replace(judged("checkpoint", trial).findings[0], launch="saved_1")
    return (found.launch, found.kinds[0], found.causes[0].finding) == ("saved_1", "checkpoint", first)


# ---- right


@pytest.mark.parametrize("training", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_parameters_and_their_optimizer_state_once_each_are_right(training: Any) -> None:
    trial = saving(training=training)
    result = judged("checkpoint", trial)
    parameters = len(trial.plan.shapes)
    assert (result.verdict, result.examined) == (Verdict.PASS, 1 + parameters * (1 if training is SGD else 3))


def test_integers_single_numbers_and_small_objects_may_be_saved_besides() -> None:
    more = [SavedTensor("rng", "", (5056,), "uint8", 5056), SavedTensor("loss", "", (1,), "float32", 1)]
    held = saving().run.checkpoint
    assert held is not None
    trial = with_checkpoint(saving(), tensors=(*held.tensors, *more), objects={"loader": 2000}, unindexed=900)
    assert judged("checkpoint", trial).verdict is Verdict.PASS


def test_a_tied_weight_may_be_saved_under_both_of_its_names_once() -> None:
    tied = saving(model=replace(TINY, tied_embeddings=True))
    shape = tied.case.model.parameter_shapes()["tok_embeddings.weight"]
    for names, verdict in ((["output.weight"], Verdict.PASS), (["output.weight", "grad.output.weight"], Verdict.FAIL)):
        second = [SavedTensor(name, "output.weight", shape, "float64", math.prod(shape)) for name in names]
        held = tied.run.checkpoint
        assert held is not None
        assert judged("checkpoint", with_checkpoint(tied, tensors=(*held.tensors, *second))).verdict is verdict


def test_optimizer_state_that_the_recipe_has_not_is_found() -> None:
    extra = SavedTensor(f"optimizer.{WEIGHT}.exp_avg", WEIGHT, (4, 4), "float64", 16)
    sgd = saving(training=SGD)
    held = sgd.run.checkpoint
    assert held is not None
    trial = with_checkpoint(sgd, tensors=(*held.tensors, extra))
    assert judged("checkpoint", trial).verdict is Verdict.FAIL


def test_a_launch_that_saves_nothing_has_nothing_to_judge() -> None:
    assert judged("checkpoint", trial_of(tiny_case("fsdp_2"))).verdict is Verdict.NOT_APPLICABLE


def test_a_format_that_nobody_can_read_is_unknown_with_the_reason() -> None:
    trial = with_checkpoint(saving(), unread="not complete in torch's distributed format")
    result = judged("checkpoint", trial)
    assert (result.verdict, result.note) == (Verdict.UNKNOWN, "not complete in torch's distributed format")
    trial = replace(trial, run=replace(trial.run, checkpoint=None))
    assert judged("checkpoint", trial).note == "what was saved was not examined"


# ---- wrong


def besides(prefix: str) -> Trial:
    def change(tensor: SavedTensor) -> list[SavedTensor]:
        copied = replace(tensor, name=tensor.name.replace("model.", f"{prefix}."))
        return [tensor, copied] if tensor.name.startswith("model.") else [tensor]

    return with_tensors(saving(), change)


@pytest.mark.parametrize("prefix", ["gradients", "ema"])
def test_a_second_tensor_of_each_parameter_is_named(prefix: str) -> None:
    trial = besides(prefix)
    (found,) = [one for one in judged("checkpoint", trial).findings if one.name == WEIGHT]
    assert (found.kind, found.quantity, found.expected, found.observed) == ("parameter", "parameter", 1, 2)
    assert found.note == f"model.{WEIGHT}, {prefix}.{WEIGHT}"
    assert is_named(trial)


def test_optimizer_state_in_another_type_is_named() -> None:
    def change(tensor: SavedTensor) -> list[SavedTensor]:
        return [replace(tensor, dtype="bfloat16") if "exp_avg" in tensor.name else tensor]

    trial = with_tensors(saving(), change)
    assert {one.observed for one in judged("checkpoint", trial).findings} == {"bfloat16"}
    assert is_named(trial)


def test_a_parameter_that_is_not_saved_is_named() -> None:
    trial = with_tensors(saving(), lambda tensor: [] if tensor.name == f"model.{WEIGHT}" else [tensor])
    (found,) = judged("checkpoint", trial).findings
    assert (found.kind, found.name, found.quantity, found.observed) == ("parameter", WEIGHT, "parameter", "missing")
    assert is_named(trial)


def test_pieces_that_overlap_or_leave_a_gap_are_found() -> None:
    for numbers in (8, 15, 32):
        trial = with_tensors(
            saving(), lambda t, n=numbers: [replace(t, numbers=n) if t.name == f"model.{WEIGHT}" else t]
        )
        (found,) = judged("checkpoint", trial).findings
        assert (found.name, found.expected, found.observed, found.unit) == (WEIGHT, 16, numbers, "elements")


def test_a_tensor_that_is_about_no_parameter_is_found() -> None:
    held = saving().run.checkpoint
    assert held is not None
    trial = with_checkpoint(saving(), tensors=(*held.tensors, SavedTensor("buffer", "", (64,), "float64", 64)))
    assert [finding.name for finding in judged("checkpoint", trial).findings] == ["buffer"]
    assert is_named(trial)


def test_large_objects_and_files_that_the_index_does_not_know_are_found() -> None:
    trial = with_checkpoint(saving(), objects={"everything": 20_000}, unindexed=40_000)
    found = [(finding.kind, finding.observed, finding.unit) for finding in judged("checkpoint", trial).findings]
    assert found == [("file", 20_000, "bytes"), ("file", 40_000, "bytes")]


# ---- when it is written


class Recorded:
    """A trainer and a probe that say what is asked of them, in order."""

    def __init__(self) -> None:
        self.requested: list[Any] = []

    def train(self, last_step: int) -> None:
        self.requested.append(last_step)

    def save(self, folder: Path) -> None:
        self.requested.append("save")

    def finish_training(self) -> None:
        self.requested.append("trained")

    @contextlib.contextmanager
    def saving_checkpoint(self) -> Iterator[None]:
        self.requested.append("saving")
        yield
        self.requested.append("saved")


def test_a_launch_saves_where_it_is_asked_to_and_belongs_to_no_step_meanwhile() -> None:
    for saved, requested in (
        (Saved(2), [2, "trained", "save"]),
        (Saved(2, until=3), [2, "saving", "save", "saved", 3, "trained"]),
    ):
        launches = tiny_case("single", resume=(saved,)).launches
        both = Recorded()
        rank_main.train_and_write(both, launches["saved_1"], {"checkpoints": ""}, both)  # type: ignore[arg-type]
        assert both.requested == requested
        last = Recorded()
        rank_main.train_and_write(last, launches["run"], {"checkpoints": ""}, last)  # type: ignore[arg-type]
        assert last.requested == [3, "trained"]


# ---- reading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {
        "model": {"tok.weight": torch.ones(4, 2)},
        "optimizer": {"tok.weight.exp_avg": torch.ones(4, 2)},
        "step": 3,
    }
    dcp.save(state, checkpoint_id=tmp_path / "step_1", no_dist=True)
    return tmp_path


def told(folder: Path) -> Checkpoint:
    return read_checkpoint_index(folder, {"embeddings.weight"}, lambda name: name.replace("tok", "embeddings"))


def test_the_index_tells_names_shapes_types_and_the_rest(folder: Path) -> None:
    found = told(folder)
    assert sorted(found.tensors, key=lambda tensor: tensor.name) == [
        SavedTensor("model.tok.weight", "embeddings.weight", (4, 2), "float32", 8),
        SavedTensor("optimizer.tok.weight.exp_avg", "embeddings.weight", (4, 2), "float32", 8),
    ]
    assert list(found.objects or {}) == ["step"]
    assert (found.unindexed, found.unread) == (0, "")


def test_a_file_that_the_index_does_not_know_is_counted(folder: Path) -> None:
    (folder / "gradients.pt").write_bytes(b"x" * 1000)
    assert told(folder).unindexed == 1000


def test_an_older_checkpoint_beside_it_is_another_matter(folder: Path) -> None:
    import os

    import torch
    import torch.distributed.checkpoint as dcp

    os.utime(folder / "step_1" / ".metadata", (1, 1))
    dcp.save({"other": torch.ones(2)}, checkpoint_id=folder / "step_2", no_dist=True)
    found = told(folder)
    assert ([tensor.name for tensor in found.tensors], found.unindexed) == (["other"], 0)


def test_what_cannot_be_read_says_why(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (folder / "step_1" / ".metadata").write_bytes(b"garbage")
    assert told(folder).unread.startswith(f"its index {folder}/step_1/.metadata cannot be read: ")
    other = tmp_path_factory.mktemp("other")
    assert told(other).unread == f"{other}: not complete in torch's distributed format, the only one read here: no file"
    (other / "model.safetensors").touch()
    assert told(other).unread.endswith("read here: 1 files, model.safetensors among them")
