"""Grids of settings: their cells, measured in turns, and the table of them."""
