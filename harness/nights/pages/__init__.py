"""A run as a CI job shows it."""
