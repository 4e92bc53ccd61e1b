"""What measures by itself as torchrun's workers: collectives and devices."""
