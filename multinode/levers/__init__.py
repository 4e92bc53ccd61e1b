"""Levers: what changes a training itself. Each is a value: options as typed, words, variables of the workers, needs."""
