"""Random numbers of a recomputation that are not those of the forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from harness.diagnosis.assume import another_reference
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.words import finding_line, some
from harness.judge.result import Cause
from harness.judge.trial import Trial


def masks_drawn_again(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Random numbers of a recomputation that are not those of forward. Told by the generator's state."""
    seen = [step.activity for _, step, _ in trial.steps()]
    other, drawn = {fqn for one in seen for fqn in one.other_states}, any(one.random.get("backward") for one in seen)
    if not other or not drawn or "gradients" not in broken:
        return
    from harness.reference.masks import recomputed_without_random_state

    blocks = sorted(fqn for fqn in other if not any(fqn.startswith(f"{outer}.") for outer in other))
    lost = "its dropout masks differ from those of the loss"
    observed = f"recomputation of {some(blocks, 4)} starts from another random state than forward"
    cause = Cause("random state not restored", observed, hint=lost)
    checks, altered = ("gradients", "grad_norm", "loss", "reported_loss"), recomputed_without_random_state(blocks)
    lines = (finding_line(broken["gradients"]),)
    yield Hypothesis(cause, partial(another_reference, altered=altered), 1, lines, checks)
