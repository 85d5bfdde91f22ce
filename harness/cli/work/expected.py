"""Errors that keep a command from judging and are no mistake of ours: their message is all that a person is told."""

from __future__ import annotations

from harness.cli.parsing import BadInput
from harness.evidence.errors import CheckError, ToldError
from harness.evidence.store import EvidenceError
from harness.judge.golden import GoldenError
from harness.launch import LaunchError
from harness.report.output import OutputError
from harness.spec.case import CaseError

EXPECTED = (
    BadInput,
    CaseError,
    CheckError,
    EvidenceError,
    GoldenError,
    LaunchError,
    OutputError,
    ToldError,
)
