"""What the commands on clusters do."""
