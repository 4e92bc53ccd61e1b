"""Changes of a training, judged by the loss or by the speed that they reach."""
