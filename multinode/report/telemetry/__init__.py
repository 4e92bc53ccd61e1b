"""What CPU, GPU and NIC counters say of a slow machine, in words."""
