"""Reports: text, grid, pictures and progress for a person, documents for a program."""
