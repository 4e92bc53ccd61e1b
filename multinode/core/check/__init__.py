"""What a check finds."""
