"""Who waits for whom in a job, where the calls of its ranks differ, and which rank is to blame, by any kind of evidence.

A run, a recording and Flight Recorder dumps are each converted to one `RankExit` per rank: how it ended,
and what it issued over which groups, as far as that is on record. `blame_of` applies the rules to all of them.
"""
