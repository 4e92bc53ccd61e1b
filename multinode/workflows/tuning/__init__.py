"""tune: short runs of the best changes, judged by the loss that they reach."""
