"""The harness's pytest plugin, which `harness_cases` in pyproject.toml gives the cases of this repository."""

pytest_plugins = ["harness.plugin"]
