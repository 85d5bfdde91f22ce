"""Searches for what failed a check: a commit of a trainer, or a version of a package."""

from harness.core.evidence.errors import UserError


class BisectError(UserError):
    """An error that leaves nothing to search for. The message says what to change."""
