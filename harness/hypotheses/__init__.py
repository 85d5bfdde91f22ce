"""Further questions to ask of failing checks, each of which proposes what the engine of core/causes then judges again.

    recipe.py            which other recipe leads from these gradients to these weights; ways.py has the recipes.
    whose.py             which recorded value a wrong one is equal to.
    fed.py               which samples were fed in place of the requested ones; received.py: at which positions.
    piece_weights.py     with which weights parts add up to a gradient; other_groups.py: over which ranks they were summed.
    backward.py          where backward goes wrong, or is rounded; passed_back.py: what a stage passes back.
    started.py           from which weights training starts; resumed.py: what a resumed launch lost.
    tied.py, dropout.py  copies of a tied weight; masks of dropout.
    exported.py          what is wrong with an export; reported_numbers.py: with numbers that a trainer reports.
    seen.py              what checks have seen of these where none is proven.

The order in which all are asked is core/causes/__init__.py's, by their names.
"""

from __future__ import annotations

from harness.core.rings import Ring

RING = Ring(
    suspects=(
        "harness.hypotheses.resumed:resumed_otherwise",
        "harness.hypotheses.resumed:copies_not_loaded",
        "harness.hypotheses.started:changed_weights",
        "harness.hypotheses.recipe:wrong_recipe",
        "harness.hypotheses.reported_numbers:wrong_numbers",
        "harness.hypotheses.exported:wrong_exports",
        "harness.hypotheses.started:other_weights",
        "harness.hypotheses.fed:other_samples",
        "harness.hypotheses.received:other_positions",
        "harness.hypotheses.dropout:lacks_dropout",
        "harness.hypotheses.dropout:other_masks",
        "harness.hypotheses.tied:copies_trained_apart",
        "harness.hypotheses.passed_back:multiples_passed_back",
    ),
    costly=("harness.hypotheses.piece_weights:sums_of_pieces", "harness.hypotheses.whose:another_tensor"),
    facts=(
        "harness.hypotheses.seen:seen_resuming",
        "harness.hypotheses.seen:seen_weights",
        "harness.hypotheses.seen:seen_samples",
        "harness.hypotheses.seen:seen_positions",
        "harness.hypotheses.seen:seen_changes",
        "harness.hypotheses.backward:rounded_to_float32",
        "harness.hypotheses.backward:coarsely_rounded_numbers",
        "harness.hypotheses.backward:random_state_not_restored",
        "harness.hypotheses.backward:wrong_backward",
        "harness.hypotheses.reported_numbers:odd_numbers",
        "harness.hypotheses.exported:odd_exports",
    ),
)
