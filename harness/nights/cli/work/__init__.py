"""The work of the commands on many runs."""
