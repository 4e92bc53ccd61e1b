"""A virtual Ethernet cluster on one Linux machine."""
