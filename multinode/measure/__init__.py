"""Collect measurements: collective benchmarks, samplers."""
