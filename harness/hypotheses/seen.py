"""What checks have seen of hypotheses that are not proven."""

from __future__ import annotations

from harness.core.causes.hypothesis import as_seen
from harness.hypotheses.fed import other_samples
from harness.hypotheses.received import other_positions
from harness.hypotheses.resumed import resumed_otherwise
from harness.hypotheses.started import changed_weights, other_weights

seen_resuming = as_seen(resumed_otherwise)
seen_weights = as_seen(other_weights)
seen_samples = as_seen(other_samples)
seen_positions = as_seen(other_positions)
seen_changes = as_seen(changed_weights)
