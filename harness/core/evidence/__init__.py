"""The evidence of a rank: its records, how they are saved and loaded, and the reference's names for parameters."""
