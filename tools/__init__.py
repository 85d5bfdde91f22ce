"""What maintainers of this repository run, and those who only use the harness never need."""
