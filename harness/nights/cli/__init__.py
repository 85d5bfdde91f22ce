"""The arguments of the commands on many runs: nightly, bisect, report and compare."""
