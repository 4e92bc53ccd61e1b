"""The job: its files, the engines that start it, and the plan of its launch."""
