"""What failed a check: a commit of a trainer, or a version of a package."""


class BisectError(Exception):
    """Nothing can be searched for. The message says what to change."""
