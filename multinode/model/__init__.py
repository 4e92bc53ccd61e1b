"""Model: what a job costs: parameters, FLOPs, memory, and what each step sends."""
