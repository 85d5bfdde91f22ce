"""What an adapter says of a trainer whose wrapper, marks, schedule and reductions are its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import stage

from harness.core.evidence.records import Wrapper
from harness.core.probe import Probe
from harness.core.probe.pipeline import note_action, pass_of_schedule
from harness.core.probe.structure import note_placement, note_wrapper, parameter_evidence, wrapper_evidence
from harness.core.probe.values import reducing_gradients


@pytest.fixture
def probe() -> Iterator[Probe]:
    watch = Probe(0, 1)
    watch.install()
    yield watch
    watch.remove()


def test_a_wrapper_of_the_trainers_own_is_a_claim_as_any_other() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    note_wrapper(model, "ddp", replicate_ranks=[0, 2])
    assert wrapper_evidence([model]) == {"": Wrapper("ddp", replicate_ranks=(0, 2))}


def test_a_mark_on_a_parameter_is_a_claim_of_its_placement_and_of_its_whole_shape() -> None:
    layer = nn.Linear(3, 2)
    note_placement(layer.weight, [4, 5], 1)
    note_placement(layer.bias, [4, 5], None)
    claims = [(t.fqn, t.global_shape, t.mesh, t.placements) for t in parameter_evidence([layer])]
    assert claims == [("weight", (2, 6), [4, 5], ("Shard(1)",)), ("bias", (2,), [4, 5], ("Replicate",))]


def test_reductions_behind_backward_belong_to_it_and_what_follows_does_not(probe: Probe) -> None:
    assert probe.clock.phase() == "other"
    with reducing_gradients():
        assert probe.clock.phase() == "backward"
    assert probe.clock.phase() == "other"


def test_a_schedule_of_the_trainers_own_is_one_pass_with_its_actions(probe: Probe) -> None:
    with pass_of_schedule():
        assert probe.clock.step_and_phase() == (1, "pipeline")
        note_action(1, "F", 0)
        note_action(1, "B", 0)
    assert probe.clock.step_and_phase() == (1, "other")
    assert probe.pipeline.actions == {1: ["1F0", "1B0"]}


def test_without_a_probe_an_adapters_words_are_heard_by_nobody() -> None:
    note_action(0, "F", 0)
    with pass_of_schedule(), reducing_gradients():
        assert torch.ones(1).item() == 1.0


def test_a_stage_with_methods_of_its_own_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    base = stage._PipelineStageBase
    monkeypatch.setattr(base, "forward_one_chunk", lambda self, fwd_chunk_id, args, kwargs=None: None)
    before = base.forward_one_chunk

    class Own(stage.PipelineStage):
        stage_index = 2
        forward_one_chunk = before  # as of a wrapper that kept torch's method before the probe came

        def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
            base.forward_one_chunk(self, bwd_chunk_id, ())

    watch = Probe(0, 1)
    watch.install()
    own = object.__new__(Own)
    own.forward_one_chunk(0, ())
    own.backward_weight_one_chunk(1)
    watch.remove()
    assert watch.pipeline.actions == {0: ["2F0", "2W1"]}
    assert vars(Own)["forward_one_chunk"] is before
