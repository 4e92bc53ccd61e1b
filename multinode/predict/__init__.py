"""What another network or setting would give."""
