"""What is to be trained: scripts and LLaMA-Factory files, their settings, DeepSpeed's JSON, the model's size."""
