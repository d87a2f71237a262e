"""One training step, from the first hook of a forward to the updated parameters on all ranks."""
