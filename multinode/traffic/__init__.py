"""What collectives and strategies send."""
