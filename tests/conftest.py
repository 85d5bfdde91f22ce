"""What the reference computes inside the tests uses one thread, as ranks do: several would wait for each other's core."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read once, when torch is imported
