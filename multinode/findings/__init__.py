"""Judgements: what was found, and the rules that word it."""
