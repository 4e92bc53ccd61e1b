"""What changes a training: the mechanism of each lever of `multinode/levers`. The rest of `worker` observes."""
