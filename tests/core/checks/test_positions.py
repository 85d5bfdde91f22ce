"""Which positions model parts may be told of their tokens, on literal evidence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from literal import ADAMW, judged, tiny_case, trial_of, with_step

from harness.core.checks.positions import within_documents
from harness.core.judge.finding import Value
from harness.core.judge.trial import Trial

MASKED = replace(ADAMW, document_mask=True, seq_len=8)


def telling(trial: Trial, row: np.ndarray) -> Trial:
    return with_step(trial, 1, 2, positions=(row,))


def told(recipe: object) -> Trial:
    """Rank 1 is told the positions within the documents of a sample that somebody receives in step 2."""
    trial = trial_of(tiny_case("fsdp_2", recipe))  # type: ignore[arg-type]
    tokens = (trial.reference.tokens[trial.reference.sample_ids.index(id_)] for id_ in trial.reference.samples[1])
    return telling(trial, next(row for row in map(within_documents, tokens) if row[-1] != 7))


def test_a_document_begins_behind_each_separator() -> None:
    assert within_documents(np.array([5, 0, 7, 8, 0, 0, 9])).tolist() == [0, 1, 0, 1, 2, 0, 0]


def wrong(trial: Trial) -> list[Value]:
    """What was received and is wrong; other ranks receive none."""
    return [one.observed for one in judged("positions", trial).findings if one.observed is not None]


def test_positions_may_begin_anew_in_documents_where_attention_sees_its_own_alone() -> None:
    assert wrong(told(MASKED)) == []


def test_positions_that_begin_anew_are_wrong_where_attention_looks_past_separators() -> None:
    assert len(wrong(told(replace(MASKED, document_mask=False)))) == 1


def test_positions_that_begin_anew_where_no_document_does_are_wrong() -> None:
    trial = trial_of(tiny_case("fsdp_2", MASKED))
    assert len(wrong(telling(trial, np.zeros(8, np.int64)))) == 1
