"""A harness that proves that a distributed Llama 3 trainer does what its configuration says."""

from pathlib import Path

from harness import old_names

__version__ = "0.2.0"
"""The version of the package, which pyproject.toml reads from here."""

ROOT = Path(__file__).resolve().parent.parent
"""Where `harness` is imported from: the top of a checkout, or a folder of installed packages."""

BUILTIN = (ROOT / "harness" / "builtin" / "cases").resolve().parent
"""Where this project's own cases/, layouts/, golden/ and upstream_bugs/ lie: the top of a checkout, to which harness/builtin/
links; harness/builtin/ itself where the harness is installed."""

old_names.install()
