"""What a person reads: text, grid, pictures, progress."""
