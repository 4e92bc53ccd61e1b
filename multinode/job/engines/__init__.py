"""Engines: what starts the workers of a job, one module each."""

# The modules with an `ENGINE`, in the order of messages.
ENGINES = ("torchrun", "llamafactory", "deepspeed", "accelerate", "exec", "serve")
