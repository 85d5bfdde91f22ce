"""What the process's own imports call, before anything of the probe is imported."""

from __future__ import annotations

from harness.core.evidence import relies_on


def imported(module: str) -> None:
    """Called once torch is imported, and its compiler and its pipelines. Raise ImportError if torch lacks what is relied on.

    Nothing is observed then, and the job goes on as if it were not recorded.
    """
    if module == "torch" and (gone := relies_on.lacking(recorder=True)):
        raise ImportError(gone)
    from harness.recording import recorder

    recorder.imported(module)
