"""What must be true of every rank, by arithmetic alone: from a case, before anything runs."""
