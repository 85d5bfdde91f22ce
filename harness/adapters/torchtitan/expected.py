"""The failures that torchtitan is expected to show: mistakes that are known and shown without the harness."""

from __future__ import annotations

import dataclasses

from harness.adapters.torchtitan.eras import Era
from harness.core.case.case import Case, ExpectedFailure

NO_SEQUENCE_PARALLEL = ExpectedFailure(
    because="torchtitan sums, scatters and gathers in each matmul of backward what one sum a crossing would do",
    script="upstream_bugs/torchtitan_tp_without_sequence_parallel.py",
    checks="traffic",
    named="traffic of no plan",
)
TIED = ExpectedFailure(
    because="torchtitan unties the weight for tensor parallel, FSDP2 notes two of it, and it is tied again",
    script="upstream_bugs/torchtitan_tied_under_tp.py",
    checks="memory placements",
    named="other units",
)
TIED_AND_SHARDED = dataclasses.replace(TIED, checks="memory placements reshard traffic")
ADAPTERS_LOST = ExpectedFailure(
    because="torchtitan's names for Hugging Face leave out what is of no name there: adapters, which nothing merges",
    script="upstream_bugs/torchtitan_lora_export.py",
    checks="export",
    named="wrong export",
)
STALE = dataclasses.replace(
    TIED_AND_SHARDED,
    because="FSDP2 notes a weight twice that torchtitan unties and ties again; the copy that pads its slice is never updated",
    script="upstream_bugs/torchtitan_tied_stale.py",
    checks=f"{TIED_AND_SHARDED.checks} loss reported_loss gradients grad_norm",
)


def expected_failure(case: Case, era: Era, *, types: bool) -> ExpectedFailure | None:
    """Return the failure that a case must show with this torchtitan; if it resumes, that of the first launch with one.

    None without any. Versions before 0.3.0 have none, because this was not tried.
    types: whether it shards by spmd_types, which unties a weight in every layout, and sums once a crossing.
    """
    launches = (_failure_of_launch(launched, era, types=types) for launched in case.launches.values())
    return next(filter(None, launches), None)


def _failure_of_launch(case: Case, era: Era, *, types: bool) -> ExpectedFailure | None:
    """Return the failure that one launch must show; None without any. types: as of expected_failure."""
    if case.model.lora is not None and case.features.export:
        return ADAPTERS_LOST
    if not era.fed_microbatches or (case.dims.tp == 1 and not types):
        return None
    if types and case.model.tied_embeddings and case.model.vocab_size % case.shards:
        return STALE
    if case.model.tied_embeddings:
        return TIED_AND_SHARDED if case.shards > 1 else TIED
    return None if types or case.features.sequence_parallel else NO_SEQUENCE_PARALLEL
