"""The work of the commands, each in a file of its name: `command` returns the exit code."""
