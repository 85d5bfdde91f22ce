"""The folder that PYTHONPATH names in a command that is recorded. Nothing else may lie in it."""
