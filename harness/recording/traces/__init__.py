"""Files that other tools left of a job, profiler traces and Flight Recorder dumps, read as evidence of its ranks.

A reader makes of one file per rank what a recording has. Which checks judge it follows from the words that it provides.
"""
