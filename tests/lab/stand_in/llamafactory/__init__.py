"""Stands in for LLaMA-Factory: its launcher, and a training that only has the settings of a YAML."""
