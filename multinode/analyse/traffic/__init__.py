"""What was sent: calls, flows and NIC counters held against what the strategy should send."""
