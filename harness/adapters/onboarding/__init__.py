"""Bringing in a new trainer: what its script says of itself, an adapter begun from that, and its examination."""
