"""Pure numbers: summaries of samples, comparisons, the cost model."""
