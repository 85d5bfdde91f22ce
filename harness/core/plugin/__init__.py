"""The pytest plugin: checks of cases as items of pytest; harness/plugin.py says when there are any."""
