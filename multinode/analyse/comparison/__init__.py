"""One side of a comparison against the other: speed-up, loss and its cause, comparability, verdict."""
