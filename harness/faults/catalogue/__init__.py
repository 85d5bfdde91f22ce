"""Deliberate mistakes by subject, one file each."""
