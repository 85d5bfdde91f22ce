"""The plan: all that must be true of every rank, derived from a case by arithmetic alone, before anything runs."""
