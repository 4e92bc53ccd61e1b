"""Files to the nodes, between them and back."""
