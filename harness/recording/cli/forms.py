"""What a recording can be printed as."""

CHROME = "chrome"
"""The form of traces that a browser's tools show."""
