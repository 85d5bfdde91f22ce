"""The positions that model parts receive, which turn queries and keys, are those of their tokens.

Where attention sees its own document only, they may begin anew in each: it sees distances, which are the same.
"""

from __future__ import annotations

import numpy as np

from harness.core.evidence.text import positions_text
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, not_applicable, verdict_of
from harness.core.judge.trial import Trial
from harness.core.plan.stages import positions

STAGE = "data"
NEEDS = frozenset({"reference", "samples"})


def check(trial: Trial) -> Result:
    counts = {rank: sum(len(step.positions) for step in evidence.steps) for rank, evidence in trial.ranks.items()}
    if not any(counts.values()):
        return not_applicable("positions", "the model receives none: it counts from 0, or reads them from a table")
    findings = []
    for rank, step, _ in trial.steps():
        wanted = positions(trial.case, rank, trial.case.seq_len(step.step))
        if not step.positions:  # others receive some
            findings.append(Finding.at(rank, positions_text(wanted), None, step=step.step, quantity="positions"))
        right = right_rows(trial, wanted, step.step)
        findings += [_finding(rank, step.step, row, right) for row in wrong_rows(step.positions, right)[:1]]
    return verdict_of("positions", findings, sum(counts.values()))


def _finding(rank: int, step: int, row: np.ndarray, right: list[np.ndarray]) -> Finding:
    wanted, nearest = right[0], nearest_row(row, right)
    note = "or those that its tokens have in their documents" * (len(right) > 1)
    if nearest is not wanted:
        note = f"counted in documents, or {positions_text(wanted)} in the whole sequence"
    return Finding.at(rank, positions_text(nearest), positions_text(row), step=step, quantity="positions", note=note)


def nearest_row(row: np.ndarray, right: list[np.ndarray]) -> np.ndarray:
    """Return the right row from which fewest entries differ."""
    return min(right, key=lambda one: np.count_nonzero(one != row) if one.shape == row.shape else row.size + 1)


def right_rows(trial: Trial, wanted: np.ndarray, step: int) -> list[np.ndarray]:
    """wanted, and under a document mask the positions within their documents of each of the step's samples."""
    if not trial.case.training.document_mask:
        return [wanted]
    reference, ids = trial.reference, set(trial.reference.samples[step - 1])
    samples = [row for id_, row in zip(reference.sample_ids, reference.tokens, strict=True) if id_ in ids]
    return [wanted, *(within_documents(row)[wanted] for row in samples)]


def within_documents(tokens: np.ndarray) -> np.ndarray:
    """Where each token of a row is in its own document, from 0."""
    from torch import from_numpy

    from harness.reference.data import documents

    of = documents(from_numpy(tokens.copy())).numpy()  # what is stored is read-only, of which torch warns
    return np.arange(len(of)) - np.searchsorted(of, of)


def wrong_rows(received: tuple[np.ndarray, ...], right: list[np.ndarray]) -> list[np.ndarray]:
    """One position a token, the same for every sample or a row for each."""
    rows = [row for positions in received for row in positions.reshape(-1, positions.shape[-1])]
    return [row for row in rows if not any(np.array_equal(row, one) for one in right)]
