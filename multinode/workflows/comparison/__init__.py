"""contrast, compare: measuring two sides, or taking two stored runs."""
