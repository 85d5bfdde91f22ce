"""What the process's own imports call, before anything of the probe is imported."""

from __future__ import annotations

from harness.core.evidence import relies_on


def imported(module: str) -> None:
    """Install what is needed, once torch is imported, its compiler or its pipelines.

    Raises ImportError if torch lacks what is relied on. Nothing is observed then, and the job goes on as if it were not
    recorded.
    """
    if module == "torch" and (lacking_text := relies_on.lacking_for_recorder()):
        raise ImportError(lacking_text)
    from harness.recording import recorder

    recorder.imported(module)
