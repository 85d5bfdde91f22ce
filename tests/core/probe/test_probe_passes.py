"""Which forward passes train, which losses are theirs: a model that the probe knows nothing of, in this process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness.core.evidence.step import Call, Microbatch
from harness.core.probe import Probe

LABELS = torch.tensor([[1, 2, -100, 4], [5, -100, 6, 7]])


@pytest.fixture
def probe() -> Iterator[Probe]:
    """Of a model of 8 tokens, whose optimizer steps by hand."""
    torch.manual_seed(0)
    watch = Probe(0, 1)
    watch.install()
    watch.model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))  # type: ignore[attr-defined]
    watch.optimizer = torch.optim.SGD(watch.model.parameters(), lr=0.1)  # type: ignore[attr-defined]
    watch.attach([watch.model])  # type: ignore[attr-defined]
    yield watch
    watch.remove()


def train(probe: Probe, tokens: int = 1) -> None:
    logits = probe.model(torch.full((2, 4), tokens))
    cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="sum").backward()


def step(probe: Probe) -> None:
    probe.optimizer.step()
    probe.optimizer.zero_grad()


def validate(probe: Probe) -> None:
    logits = probe.model.eval()(torch.zeros(2, 4, dtype=torch.int64))
    cross_entropy(logits.flatten(0, 1), LABELS.flatten())
    probe.model.train()


def tokens_of(probe: Probe) -> dict[int, list[int]]:
    """By step, the token that each pass received."""
    probe.finish_training()
    found = {s.step: s.microbatches for s in probe.evidence({}).steps}
    return {
        number: [int(part.tokens[0, 0]) for part in parts if part.tokens is not None] for number, parts in found.items()
    }


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_validation_pass_belongs_to_no_step(probe: Probe, mode: type) -> None:
    def in_mode() -> None:
        with mode():
            validate(probe)

    in_mode()
    for number in (1, 2):
        train(probe, number)
        in_mode()
        train(probe, number)
        in_mode()
        step(probe)
        in_mode()
    assert tokens_of(probe) == {1: [1, 1], 2: [2, 2]}
    (one, two) = probe.evidence({}).steps
    assert [part.valid_tokens for part in (*one.microbatches, *two.microbatches)] == [6, 6, 6, 6]
    assert one.activity.calls == {Call("forward", ""): 2, Call("forward", "0"): 2, Call("forward", "1"): 2}
    assert len(one.after_forward) == 2
    assert (one.changed, two.changed) == ({}, {})


KEPT: list[
    Any
] = []  # a reducer that is the last to hold a gloo group may hang: upstream_bugs/gloo_group_freed_by_ddp.py


@pytest.fixture
def ddp(tmp_path: Path) -> Iterator[DistributedDataParallel]:
    """Around the usual model, of a group of one."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    KEPT.append(torch.distributed.group.WORLD)
    yield DistributedDataParallel(nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8)))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("inside", [True, False])
def test_a_pass_of_the_model_inside_ddp_is_one_and_one_through_ddp_is_counted_once(
    ddp: DistributedDataParallel, inside: bool
) -> None:
    watch = Probe(0, 1)
    watch.install()
    watch.attach([ddp])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for token in (1, 2):
        with torch.no_grad():
            ddp.module(torch.zeros(2, 4, dtype=torch.int64))
        logits = (ddp.module if inside else ddp)(torch.full((2, 4), token))
        cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
    watch.finish_training()
    steps = watch.evidence({}).steps
    watch.remove()
    assert [[int(part.tokens[0, 0]) for part in step.microbatches] for step in steps] == [[1], [2]]
    assert all(part.valid_tokens == 6 for step in steps for part in step.microbatches)


def test_a_copy_of_the_model_can_be_made_and_saved_while_it_is_observed_and_is_no_part_of_it(
    probe: Probe, tmp_path: Path
) -> None:
    train(probe, 1)
    step(probe)
    average = copy.deepcopy(probe.model)
    torch.save(probe.model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    train(probe, 2)
    for other in (average, again):
        logits = other(torch.full((2, 4), 3))
        cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="sum").backward()
    step(probe)
    assert tokens_of(probe) == {1: [1], 2: [2]}
    (_, two) = probe.evidence({}).steps
    assert two.activity.calls == {Call("forward", ""): 1, Call("forward", "0"): 1, Call("forward", "1"): 1}


def test_a_model_inside_ddp_can_be_copied_while_it_is_observed(ddp: DistributedDataParallel) -> None:
    watch = Probe(0, 1)
    watch.install()
    watch.attach([ddp])
    ddp(torch.ones(2, 4, dtype=torch.int64)).sum().backward()
    copied = copy.deepcopy(ddp.module)
    watch.remove()
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in ddp.module.named_parameters()]


def test_a_model_may_train_in_eval_mode(probe: Probe) -> None:
    probe.model.eval()
    for number in (1, 2):
        train(probe, number)
        step(probe)
    assert tokens_of(probe) == {1: [1], 2: [2]}
    assert probe.evidence({}).steps[0].activity.calls == {
        Call("forward", ""): 1,
        Call("forward", "0"): 1,
        Call("forward", "1"): 1,
    }


def test_weights_that_validation_alters_are_noticed(probe: Probe) -> None:
    train(probe)
    step(probe)
    with torch.no_grad():
        validate(probe)
        probe.model[1].bias.add_(1.0)
    train(probe)
    step(probe)
    probe.finish_training()
    assert [list(s.changed or {}) for s in probe.evidence({}).steps] == [["1.bias"], []]


def losses_of(probe: Probe) -> tuple[Microbatch, ...]:
    step(probe)
    probe.finish_training()
    return probe.evidence({}).steps[0].microbatches


def in_pieces(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_loss_in_chunks_that_backward_computes_again_counts_each_token_once(probe: Probe, reentrant: bool) -> None:
    logits = probe.model(torch.ones(2, 4, dtype=torch.int64))
    parts = zip(logits.chunk(2, dim=1), LABELS.chunk(2, dim=1), strict=True)
    loss: Any = sum(checkpoint(in_pieces, *part, use_reentrant=reentrant) for part in parts)
    loss.backward()
    (part,) = losses_of(probe)
    assert (part.chunks, part.valid_tokens, part.loss_sum) == ((4, 4), 6, pytest.approx(float(loss.detach())))


def test_a_loss_is_seen_however_it_is_called(probe: Probe) -> None:
    for compute in (
        lambda x, t: cross_entropy(x, t, reduction="mean"),
        lambda x, t: nn.CrossEntropyLoss(reduction="none")(x, t).sum(),
        lambda x, t: nn.NLLLoss(reduction="sum")(x.log_softmax(-1), t),
        lambda x, t: nn.functional.nll_loss(x.log_softmax(-1), t, None, None, -100, None, "sum"),
    ):
        compute(probe.model(torch.ones(2, 4, dtype=torch.int64)).flatten(0, 1), LABELS.flatten()).backward()
    found = losses_of(probe)
    assert [part.valid_tokens for part in found] == [6] * 4
    assert len({round(part.loss_sum or 0.0, 3) for part in found}) == 1
    assert all(part.labels is not None and part.labels.tolist() == LABELS.tolist() for part in found)


def test_a_loss_without_gradients_beside_one_with_them_is_only_shown(probe: Probe) -> None:
    logits = probe.model(torch.ones(2, 4, dtype=torch.int64)).flatten(0, 1)
    with torch.no_grad():
        cross_entropy(logits, LABELS.flatten())
    cross_entropy(logits, LABELS.flatten()).backward()
    (part,) = losses_of(probe)
    assert (part.valid_tokens, part.chunks) == (6, ())


def test_losses_of_two_passes_that_are_computed_after_both_are_told_apart(probe: Probe) -> None:
    passes = [probe.model(torch.full((2, 4), token)) for token in (1, 2)]
    sum(in_pieces(logits, LABELS) for logits in passes).backward()  # type: ignore[union-attr]
    assert [(part.valid_tokens, part.chunks) for part in losses_of(probe)] == [(6, ()), (6, ())]


def test_a_loss_of_made_up_data_with_which_stages_find_their_shapes_belongs_to_no_step(probe: Probe) -> None:
    """Within the first pass of a schedule, on its real loss function (torch 2.13, of stages that were told no shapes)."""
    labels = LABELS.flatten()
    with probe.clock.schedule_pass(training=True):
        with probe.clock.outside_of_steps():
            cross_entropy(probe.model(torch.zeros(2, 4, dtype=torch.int64)).flatten(0, 1), torch.ones_like(labels))
        with probe.clock.loss_of_schedule():
            cross_entropy(probe.model(torch.ones(2, 4, dtype=torch.int64)).flatten(0, 1), labels).backward()
    (part,) = [part for part in losses_of(probe) if part.loss_sum is not None]
    assert part.labels is not None and part.labels.ravel().tolist() == labels.tolist()


def test_a_loss_reduced_in_place_is_kept_as_it_was(probe: Probe) -> None:
    loss = in_pieces(probe.model(torch.ones(2, 4, dtype=torch.int64)), labels := LABELS.clone())
    before = float(loss.detach())
    loss.backward()
    loss.detach().mul_(2)
    labels.fill_(0)
    (part,) = losses_of(probe)
    assert part.loss_sum == pytest.approx(before)
    assert part.labels is not None and part.labels.tolist() == LABELS.tolist()


def test_compiled_code_leaves_no_loss_rather_than_one_made_up(probe: Probe) -> None:
    compiled = torch.compile(in_pieces, backend="eager")
    compiled(probe.model(torch.ones(2, 4, dtype=torch.int64)), LABELS).backward()
    assert [part.loss_sum is None or part.valid_tokens == 6 for part in losses_of(probe)] == [True]
