"""What travels between the ranks in a step: parameters, gradients, buffers."""
