"""Layouts as text and as documents."""
