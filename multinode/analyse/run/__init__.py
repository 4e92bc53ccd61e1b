"""What a run recorded, step by step, and from where on it is steady."""
