"""What adapters share, and what brings trainers here."""
