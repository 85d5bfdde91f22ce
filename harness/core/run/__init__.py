"""The straight line itself: one case, many cases, the catalogue of faults."""
