"""Tuning: which change reaches the loss of the training as it stands sooner."""
