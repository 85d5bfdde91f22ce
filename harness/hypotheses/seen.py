"""Facts about hypotheses that are not proven: what checks have seen of them directly."""

from __future__ import annotations

from harness.core.causes.hypothesis import facts_of_unproven
from harness.hypotheses.fed import other_samples
from harness.hypotheses.received import other_positions
from harness.hypotheses.resumed import resumed_otherwise
from harness.hypotheses.started import changed_weights, other_weights

seen_resuming = facts_of_unproven(resumed_otherwise)
seen_weights = facts_of_unproven(other_weights)
seen_samples = facts_of_unproven(other_samples)
seen_positions = facts_of_unproven(other_positions)
seen_changes = facts_of_unproven(changed_weights)
