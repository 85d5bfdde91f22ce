"""How many bytes each step moves, over which ranks, by which collective: one file for each kind of parallelism."""
