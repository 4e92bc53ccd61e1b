"""sweep, table, import: measuring a grid of cells, resuming it, and its table."""
