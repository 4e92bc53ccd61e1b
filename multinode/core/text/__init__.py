"""Text and plain values: YAML with its line numbers, secrets in it, plausible figures, rounding.

It knows nothing of clusters, jobs or runs.
"""
