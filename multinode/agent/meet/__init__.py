"""Nodes meet: connections and streams between two of them."""
