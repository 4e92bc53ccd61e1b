"""Which change of a measured training pays: options, situations and their ranking."""
