"""What `harness record` does, and what others do with a recording."""
