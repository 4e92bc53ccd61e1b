"""Exports: a run's figures and samples in the files and services that other tools show. Only records are read."""
