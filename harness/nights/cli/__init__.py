"""What can be typed behind the commands on many runs: nightly, bisect, report and compare."""
