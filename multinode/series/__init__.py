"""Several short runs in turns, which are taken up where they were broken off."""
