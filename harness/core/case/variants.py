"""Cases in another dtype than they are written in, for a trainer that computes in one only: `harness matrix --dtype float32`.

Layout, features and name stay, so all checks judge what they judge in float64; the reference computes the same recipe, and
bounds are measured from its noise. docs/adapters.md says what is seen then, and what not.
"""

from __future__ import annotations

import dataclasses

from harness.core.case import limits
from harness.core.case.case import Case, CaseError
from harness.core.case.features import Features


def with_dtype(case: Case, dtype: str | None) -> Case:
    """Return the case in this dtype, as the case of no file. The case itself if `dtype` is None or its own.

    A compute or reduce dtype that equals the old dtype becomes the new one as well, in earlier launches too.
    """
    old = case.training.dtype
    if dtype is None or dtype == old:
        return case
    compute = dtype if case.training.compute_dtype == old else case.training.compute_dtype
    return dataclasses.replace(
        case,
        training=dataclasses.replace(case.training, dtype=dtype, compute_dtype=compute),
        features=_with_reduce_dtype(case.features, old, dtype),
        resume=tuple(
            dataclasses.replace(saved, features=_with_reduce_dtype(saved.features, old, dtype)) for saved in case.resume
        ),
        file="",
    )


def _with_reduce_dtype(features: Features, old: str, dtype: str) -> Features:
    return dataclasses.replace(features, reduce_dtype=dtype) if features.reduce_dtype == old else features


def with_seed(case: Case, seed: int) -> Case:
    """Return the case with another seed: other weights, data and order. Raises CaseError for a seed that is negative or
    too large.

    It is the case of no file, and has no golden.
    """
    reseeded_case = dataclasses.replace(case, training=dataclasses.replace(case.training, seed=seed), file="")
    if problem := limits.size_problem(reseeded_case):
        raise CaseError(problem)
    return reseeded_case
