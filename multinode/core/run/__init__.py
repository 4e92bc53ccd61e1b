"""One run: plan and command of every node, engines, progress, samples, and how it ended."""
