"""What the commands on many runs do."""
