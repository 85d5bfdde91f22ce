"""What the commands on adapters do."""
