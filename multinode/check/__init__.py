"""What is wrong before a launch, and the fix."""
