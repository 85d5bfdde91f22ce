"""Whether a hypothesis of the optimizer says what ranks hold: what several tests of diagnoses use."""

from __future__ import annotations

import numpy as np
from literal import judged

from harness.core.causes.hypothesis import Hypothesis
from harness.core.judge.contents import view_of_slice
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial


def follows(trial: Trial, one: Hypothesis) -> Trial:
    """The check of updates holds under it, and every rank holds what a reference trained so leaves. The trial assumed."""
    assert one.assume is not None
    assumed = one.assume(trial)
    result = judged("update", assumed)
    assert result.verdict is Verdict.PASS, result.findings
    for rank, step, wanted in assumed.steps_with_reference():
        for fqn, left in step.parameters.items():
            expected, where = wanted.parameters[fqn], f"rank {rank}, step {step.step}, {fqn}"
            part = assumed.slice_of(rank, fqn)
            np.testing.assert_allclose(left, view_of_slice(expected, part or ()), rtol=1e-9, atol=1e-12, err_msg=where)
    return assumed
