"""What is sampled beside a job: CPU, NICs, TCP, GPUs, and kills for lack of memory."""
