"""Probe the nodes (network), then check facts (pure)."""
