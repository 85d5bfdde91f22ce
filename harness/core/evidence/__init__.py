"""What a rank leaves behind: the records, saving and loading them, the reference's names for parameters."""
