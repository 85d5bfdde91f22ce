"""What the commands do, each in a file of its name: `command` returns the exit code."""
