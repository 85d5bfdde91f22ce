"""What `harness faults` does."""
