"""Published figures that a prediction can start from."""
