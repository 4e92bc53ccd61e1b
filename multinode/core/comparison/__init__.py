"""The sides of a comparison: which nodes and workers each has."""
