"""All that a law may look at, and what laws and diagnosis have in common."""
