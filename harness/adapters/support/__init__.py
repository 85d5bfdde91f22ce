"""What adapters of several trainers need."""
