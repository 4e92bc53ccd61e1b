"""Many nodes against few."""
