"""Traffic over tp that no plan has, told by how many activations more or fewer cross in each layer. Literal evidence."""

from __future__ import annotations

from typing import Any

import pytest
from diagnosed import dims, first_line
from literal import TINY, judged, tiny_case, trial_of, with_every_rank, with_rank

from harness.diagnosis.costs import of_no_plan
from harness.evidence.records import Collective
from harness.judge.trial import Trial
from harness.plan.traffic.tensor_parallel import activation_bytes, logits_bytes
from harness.report.cause_text import cause_line


def with_more(calls: dict[tuple[str, str], float], **features: Any) -> Trial:
    """calls: by collective and phase, how many activations more cross in each layer of each step."""
    case = tiny_case(dims(shard=2, tp=2), **features)
    size = activation_bytes(case, case.training.seq_len) * TINY.n_layers

    def more(trial: Trial, rank: int) -> Trial:
        group, found = trial.plan.group_of(rank, "tp"), list(trial.ranks[rank].collectives)
        for (op, phase), count in calls.items():
            for step in trial.case.steps:
                parts = [size // TINY.n_layers] * (int(count) * TINY.n_layers) or [int(count * size)]  # one call each
                found += [Collective(op, group, "0", "float64", part, phase, step, 99) for part in parts]
        return with_rank(trial, rank, collectives=tuple(found))

    return with_every_rank(trial_of(case), more)


def with_one_gather(size: int, **features: Any) -> Trial:
    """In each forward pass one more all_gather over tp, of so many bytes."""
    case = tiny_case(dims(shard=2, tp=2), **features)

    def more(trial: Trial, rank: int) -> Trial:
        group, found = trial.plan.group_of(rank, "tp"), list(trial.ranks[rank].collectives)
        found += [Collective("all_gather", group, "0", "float64", size, "forward", n, 99) for n in trial.case.steps]
        return with_rank(trial, rank, collectives=tuple(found))

    return with_every_rank(trial_of(case), more)


def test_one_gather_of_the_logits_is_not_told_as_activations_that_cross_in_each_layer() -> None:
    case = tiny_case(dims(shard=2, tp=2))
    size, logits = (of(case, case.training.seq_len) for of in (activation_bytes, logits_bytes))
    assert logits % (size * TINY.n_layers) == 0  # as much as several activations in each layer
    text = of_traffic(with_one_gather(logits))
    assert "in each layer" not in text and "logits" in text and "loss_parallel: false" in text
    other = of_traffic(with_one_gather(6 * size * TINY.n_layers))
    assert "in each layer" not in other and "logits" not in other


RECOMPUTED = {"activation_checkpointing": "full"}


@pytest.mark.parametrize(
    ("calls", "features", "told"),
    [
        ({("reduce_scatter", "backward"): 3}, {}, "3 more reduce_scatter in backward in each layer"),
        ({("all_to_all", "forward"): 3}, {}, "3 more all_to_all in forward in each layer"),
        (
            {("reduce_scatter", "backward"): 2},
            {},
            "2 more reduce_scatter in backward in each layer, as where wq, wk and wv each do so for their own input",
        ),
        (
            {("all_gather", "forward"): 1, ("reduce_scatter", "backward"): 1},
            {},
            "1 more all_gather in forward, 1 more reduce_scatter in backward in each layer,"
            " as where w1 and w3 each do so for their own input",
        ),
        (
            {("reduce_scatter", "backward"): 1},
            RECOMPUTED,
            "1 more reduce_scatter in backward in each layer, as where recomputation issues it again",
        ),
        (
            {("reduce_scatter", "forward"): 1},
            RECOMPUTED,
            "1 more reduce_scatter in forward in each layer, as where w1 and w3 each do so for their own input",
        ),
    ],
)
def test_activations_that_cross_more_often_are_counted_in_each_layer(
    calls: dict[tuple[str, str], float], features: dict[str, Any], told: str
) -> None:
    assert of_traffic(with_more(calls, **features)).endswith(f"; as with {told}")


def of_traffic(trial: Trial) -> str:
    (fact,) = of_no_plan(trial, {"traffic": judged("traffic", trial)})
    return cause_line(fact.cause)


def test_what_is_no_multiple_of_an_activation_is_told_by_its_bytes() -> None:
    assert "as with" not in first_line(with_more({("reduce_scatter", "backward"): 0.5}))


def test_activations_that_do_not_cross_are_fewer() -> None:
    trial = with_more({})
    for rank in trial.ranks:
        group = trial.plan.group_of(rank, "tp")
        kept = [
            c for c in trial.ranks[rank].collectives if (c.ranks, c.op, c.phase) != (group, "all_gather", "forward")
        ]
        trial = with_rank(trial, rank, collectives=tuple(kept))
    assert "fewer all_gather in forward in each layer" in first_line(trial)
