"""What multinode measures by itself: collectives and devices, as a plan asks for them."""
