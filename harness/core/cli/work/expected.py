"""Errors that keep a command from judging and are no mistake of ours: their message is all that a person is told."""

from __future__ import annotations

from harness.core.case.case import CaseError
from harness.core.cli.parsing import BadInput
from harness.core.evidence.errors import CheckError, UserError
from harness.core.evidence.store import EvidenceError
from harness.core.judge.golden import GoldenError
from harness.core.launch import LaunchError
from harness.core.report.output import OutputError

EXPECTED = (
    BadInput,
    CaseError,
    CheckError,
    EvidenceError,
    GoldenError,
    LaunchError,
    OutputError,
    UserError,
)
