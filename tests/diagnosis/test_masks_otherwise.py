"""Masks of embeddings, dropout and documents that are not the requested ones, trained in earnest and named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from trained import MODEL, RECIPE, Ran, _ran, case_of, diagnosed  # noqa: F401

from harness.reference.altered import altering
from harness.reference.masks import mask_of_first_row, other_dropout, unmasked_embedding
from harness.reference.variations import variations
from harness.report.cause_text import diagnosis_line
from harness.spec.dims import ParallelDims


@pytest.mark.parametrize("row", ["nearest", "first"])
def test_rows_of_an_embedding_that_other_tp_ranks_hold_are_masked_or_named(ran: Ran, row: str) -> None:
    case = case_of(ParallelDims(tp=2))
    (variation,) = [one for one in unmasked_embedding(2) if f"its {row} row" in one.observed]
    trial = ran(case, altered=altering(variation, ["tok_embeddings"], 1))
    assert diagnosis_line(diagnosed(trial)) == f"{variation.observed}, requested zeros"
    assert not {"not explained", "still failing"} & dict(diagnosed(trial).evidence).keys()


@pytest.mark.parametrize("place", ["attention", "feed-forward", "attention and feed-forward"])
def test_dropout_of_the_sum_with_the_residual_stream_is_told_by_its_place(ran: Ran, place: str) -> None:
    case = case_of(model=replace(MODEL, dropout=0.25))
    told = f"dropout after {place} is applied to the sum with the residual stream"
    (variation,) = [one for one in other_dropout(case.model) if one.observed == told]
    trial = ran(case, altered=altering(variation, ["layers.0"], 1))
    assert diagnosis_line(diagnosed(trial)) == f"{told}, requested before that sum"
    assert not {"not explained", "still failing"} & dict(diagnosed(trial).evidence).keys()


def test_documents_of_the_first_row_of_each_microbatch_are_told(ran: Ran) -> None:
    case = case_of(training=replace(RECIPE, document_mask=True, seq_len=16))  # in 8 tokens all documents are as long
    first = np.repeat(np.arange(0, 8, case.local_batch), case.local_batch)
    trial = ran(case, altered=altering(mask_of_first_row(first), [""], 1))
    assert (
        diagnosis_line(diagnosed(trial))
        == "all rows of a microbatch have the documents of its first, requested each row its own"
    )


@pytest.mark.parametrize(("rows", "where"), [(None, ""), (np.arange(8) >= 4, " on rank 1")])
def test_a_document_mask_that_is_lost_is_told_with_its_ranks(ran: Ran, rows: np.ndarray | None, where: str) -> None:
    case = case_of(training=replace(RECIPE, document_mask=True))
    (lost,) = [one for one in variations(case.model, case.training) if one.observed == "attention crosses documents"]
    trial = ran(case, altered=altering(lost, [""], 1, rows))
    assert diagnosis_line(diagnosed(trial)) == f"attention crosses documents{where}"
