"""The cells of a training grid: values, prices, fit, the cheapest, and imported tables."""
