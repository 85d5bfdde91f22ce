"""What can be typed behind `harness faults`."""
