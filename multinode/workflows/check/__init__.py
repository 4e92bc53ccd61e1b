"""check: probe, rules and connectivity."""
