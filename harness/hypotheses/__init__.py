"""Further questions to ask of failing checks, each of which proposes what the engine of core/causes then judges again.

Whose value is it, which recipe leads there, which samples and positions were fed, what a resumed launch lost, what was exported
or reported, where backward goes wrong.
"""

from __future__ import annotations

from harness.core.rings import Ring

RING = Ring(
    suspects=(
        "layers_lost",
        "not_trained",
        "not_frozen",
        "adapters_scaled",
        "neighbours",
        "harness.hypotheses.resumed:resumed_otherwise",
        "harness.hypotheses.resumed:copies_not_loaded",
        "harness.hypotheses.started:changed_weights",
        "harness.hypotheses.recipe:wrong_recipe",
        "wrong_reports",
        "harness.hypotheses.reported_numbers:wrong_numbers",
        "harness.hypotheses.exported:wrong_exports",
        "harness.hypotheses.started:other_weights",
        "harness.hypotheses.fed:other_samples",
        "harness.hypotheses.received:other_positions",
        "sums_of_whole_gradients",
        "lacks_the_outputs_part",
        "harness.hypotheses.dropout:lacks_dropout",
        "harness.hypotheses.dropout:other_masks",
        "harness.hypotheses.tied:copies_trained_apart",
        "harness.hypotheses.passed_back:multiples_passed_back",
    ),
    costly=("harness.hypotheses.piece_weights:sums_of_pieces", "harness.hypotheses.whose:another_tensor"),
    facts=(
        "harness.hypotheses.seen:seen_resuming",
        "process_failed",
        "of_other_stages",
        "not_finite",
        "harness.hypotheses.seen:seen_weights",
        "harness.hypotheses.seen:seen_samples",
        "harness.hypotheses.seen:seen_positions",
        "harness.hypotheses.seen:seen_changes",
        "facts",
        "harness.hypotheses.backward:rounding",
        "harness.hypotheses.backward:coarse",
        "harness.hypotheses.backward:random_state_not_restored",
        "harness.hypotheses.backward:wrong_backward",
        "odd_reports",
        "harness.hypotheses.reported_numbers:odd_numbers",
        "harness.hypotheses.exported:odd_exports",
        "observed",
    ),
)
