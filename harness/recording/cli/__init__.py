"""What can be typed behind `harness record`."""
