"""The positions that model parts receive, which turn queries and keys, are those of their tokens.

Where attention sees its own document only, they may begin anew in each: it sees distances, which are the same.
"""

from __future__ import annotations

import numpy as np

from harness.core.evidence.text import positions_text
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, not_applicable, verdict_of
from harness.core.judge.trial import Trial
from harness.core.plan.stages import token_positions_of_rank

STAGE = "data"
NEEDS = frozenset({"reference", "samples"})


def check(trial: Trial) -> Result:
    """Compare each row of positions that a rank received with those of its tokens; one finding for each step.

    NOT APPLICABLE if no rank received positions. Where some did, a rank without any in a step is a finding.
    """
    counts: dict[int, int] = {}
    for rank, evidence in trial.ranks.items():
        counts[rank] = sum(len(step.positions) for step in evidence.steps)
    if not any(counts.values()):
        return not_applicable("positions", "the model receives none: it counts from 0, or reads them from a table")
    findings = []
    for rank, step, _ in trial.steps_with_reference():
        wanted = token_positions_of_rank(trial.case, rank, trial.case.seq_len(step.step))
        if not step.positions:  # others receive some
            findings.append(Finding.at(rank, positions_text(wanted), None, step=step.step, quantity="positions"))
        expected_rows = expected_position_rows(trial, wanted, step.step)
        findings += [
            _row_finding(rank, step.step, row, expected_rows)
            for row in wrong_position_rows(step.positions, expected_rows)[:1]
        ]
    return verdict_of("positions", findings, sum(counts.values()))


def _row_finding(rank: int, step: int, row: np.ndarray, expected_rows: list[np.ndarray]) -> Finding:
    """Return the finding of a wrong row of positions, beside the right row that is nearest to it."""
    wanted = expected_rows[0]
    nearest = nearest_row(row, expected_rows)
    note = ""
    if len(expected_rows) > 1:
        note = "or those that its tokens have in their documents"
    if nearest is not wanted:
        note = f"counted in documents, or {positions_text(wanted)} in the whole sequence"
    return Finding.at(rank, positions_text(nearest), positions_text(row), step=step, quantity="positions", note=note)


def nearest_row(row: np.ndarray, expected_rows: list[np.ndarray]) -> np.ndarray:
    """Return the expected row that differs from `row` in the fewest entries. Another shape counts as more than all."""

    def differing_entries(expected_row: np.ndarray) -> int:
        """Return the number of entries in which an expected row differs; more than all for another shape."""
        if expected_row.shape != row.shape:
            return row.size + 1
        return int(np.count_nonzero(expected_row != row))

    return min(expected_rows, key=differing_entries)


def expected_position_rows(trial: Trial, wanted: np.ndarray, step: int) -> list[np.ndarray]:
    """Return the rows of positions that are right in a step: `wanted`, the positions in the whole sequence.

    Under a document mask there is one more for each sample of the step: the positions within its documents.
    """
    if not trial.case.training.document_mask:
        return [wanted]
    reference = trial.reference
    ids = set(trial.reference.samples[step - 1])
    samples = [row for id_, row in zip(reference.sample_ids, reference.tokens, strict=True) if id_ in ids]
    return [wanted, *(within_documents(row)[wanted] for row in samples)]


def within_documents(tokens: np.ndarray) -> np.ndarray:
    """Return the position of each token of a row in its own document, from 0. Imports torch."""
    from torch import from_numpy

    from harness.reference.data import document_indices

    document_of_token = document_indices(
        from_numpy(tokens.copy())
    ).numpy()  # what is stored is read-only, of which torch warns
    return np.arange(len(document_of_token)) - np.searchsorted(document_of_token, document_of_token)


def wrong_position_rows(received: tuple[np.ndarray, ...], expected_rows: list[np.ndarray]) -> list[np.ndarray]:
    """Return the received rows that equal none of the expected ones. Empty if all are right.

    A rank may receive one row of positions for all samples, or a row for each.
    """
    wrong: list[np.ndarray] = []
    for positions_received in received:
        for row in positions_received.reshape(-1, positions_received.shape[-1]):
            if not any(np.array_equal(row, expected_row) for expected_row in expected_rows):
                wrong.append(row)
    return wrong
