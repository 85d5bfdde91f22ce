"""All that a check may look at, and what checks and diagnosis have in common."""
