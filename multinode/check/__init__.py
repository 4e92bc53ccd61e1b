"""What is wrong before a launch, and what fixes it."""
