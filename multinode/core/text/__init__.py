"""Text and plain values: YAML with its places, secrets in it, durations, rounding.

It knows nothing of clusters, jobs or runs.
"""
