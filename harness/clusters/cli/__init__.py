"""What can be typed behind the commands on clusters: preflight and plan."""
