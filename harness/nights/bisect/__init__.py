"""What failed a check: a commit of a trainer, or a version of a package."""

from harness.core.evidence.errors import ToldError


class BisectError(ToldError):
    """Nothing can be searched for. The message says what to change."""
