"""What a rank needs at its most beside published peaks, and beside a real step of a small model."""

from __future__ import annotations

from typing import Any

import pytest

from harness.clusters.config_file import TITAN_TRAITS
from harness.clusters.request import Request
from harness.core.case.traits import TrainerTraits
from harness.core.plan.figures.rank_bytes import RankBytes, rank_bytes
from harness.core.plan.make_plan import make_plan
from harness.core.report.layout_text import neediest_rank

FIXED_ON: dict[str, tuple[float, dict[str, Any]]] = {
    "8B on 8": (82.4, {"dims": "dp_shard=8", "model": "8B", "batch": 16, "checkpointing": "op"}),
    "405B on 512": (
        82.5,
        {"dims": "pp=8,dp_shard=8,tp=8", "model": "405B", "batch": 256, "microbatches": 8, "checkpointing": "full"},
    ),
}
"""torchtitan's runs of the end of 2024 that the allocator's factor is fixed on: GiB reserved, and what ran."""
OTHERS: dict[str, tuple[float, dict[str, Any]]] = {
    "8B on 128": (67.0, {"dims": "dp_shard=128", "model": "8B", "batch": 256, "checkpointing": "op"}),
    "8B, cp 8": (84.5, {"dims": "cp=8", "model": "8B", "seq": 262144, "checkpointing": "full"}),
    "70B on 256": (71.9, {"dims": "dp_shard=32,tp=8", "model": "70B", "batch": 512, "checkpointing": "full"}),
    "8B, cp 1": (83.9, {"dims": "dp_shard=8", "model": "8B", "seq": 32768, "checkpointing": "full"}),
    "405B, cp 8": (
        84.9,
        {
            **{"dims": "pp=8,cp=8,tp=8", "model": "405B", "seq": 262144},
            **{"batch": 8, "microbatches": 8, "checkpointing": "full"},
        },
    ),
}
"""Those that it is tested on."""


def reserved(asked: dict[str, Any]) -> int:
    case = Request(**asked).build_case()
    return neediest_rank(case, make_plan(case, TITAN_TRAITS))[1].reserved


@pytest.mark.parametrize("name", [*FIXED_ON, *OTHERS])
def test_reserved_memory_is_within_15_percent_of_what_was_published(name: str) -> None:
    published, asked = (FIXED_ON | OTHERS)[name]
    assert reserved(asked) == pytest.approx(published * 2**30, rel=0.15)


def held(traits: TrainerTraits = TITAN_TRAITS, **asked: Any) -> RankBytes:
    case = Request(**asked).build_case()
    return rank_bytes(case, make_plan(case, traits), 0)


def test_the_loss_has_three_numbers_of_float32_for_each_logit_and_over_tp_four_of_a_part() -> None:
    logits = 8192 * 128_256
    assert held(dims="dp_shard=8", model="8B").in_loss == 3 * 4 * logits
    assert held(dims="dp_shard=8,tp=8", model="8B").in_loss == 4 * 4 * logits // 8
    assert held(TrainerTraits(loss_chunks=8), dims="dp_shard=8", model="8B").in_loss == 3 * 4 * logits // 8


def test_a_loss_begins_without_gradients_unless_microbatches_add_them_up() -> None:
    once = held(dims="dp_shard=8", model="8B")
    assert not once.waiting and once.loss_peak == once.between_steps - once.gradients + once.gathered_after_forward + (
        once.activations + once.in_loss
    )
    twice = held(dims="pp=2,dp_shard=8", model="8B")
    assert twice.waiting


@pytest.mark.parametrize(
    ("kept", "numbers"),
    [((), 4096), (("attention",), 2 * 4096), (("attention", "wq", "wv", "w1", "w2"), 4 * 4096 + 1024 + 14336)],
)
def test_a_block_that_is_recomputed_by_operator_keeps_what_the_trainers_policy_names(
    kept: tuple[str, ...], numbers: int
) -> None:
    found = held(TrainerTraits(op_keeps=kept), dims="dp_shard=8", model="8B", seq=1024, checkpointing="op")
    assert found.activations == 1024 * 2 * (32 * numbers + 2 * 4096)


def test_a_policy_that_keeps_what_no_block_has_is_refused() -> None:
    with pytest.raises(ValueError, match="op_keeps"):
        TrainerTraits(op_keeps=("w9",))


def test_zeros_optimizer_holds_its_part_of_state_and_of_a_copy_in_float32() -> None:
    elements = 8_030_261_248
    plain = held(dims="dp_shard=8", model="8B", wrapper="zero1")
    assert (plain.parameters, plain.gradients) == (2 * elements, 4 * elements)
    assert plain.optimizer == 3 * 4 * elements // 8
