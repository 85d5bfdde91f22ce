"""The traffic of a step: bytes, ranks and collective of everything that moves, one file for each kind of parallelism."""
