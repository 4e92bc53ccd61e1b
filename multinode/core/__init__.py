"""Pure data and planning: no clock, randomness, environment or subprocess."""
