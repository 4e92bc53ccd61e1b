"""advise: what pays, and trying it."""
