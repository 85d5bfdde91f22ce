"""A recording, or traces, as text and pages."""
