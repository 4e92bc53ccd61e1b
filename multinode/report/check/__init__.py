"""What a check found, as a table."""
