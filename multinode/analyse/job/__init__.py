"""What a job asks of a machine: its workload, gradients, FLOPs and memory."""
