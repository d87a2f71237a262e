"""The log of a training run, written while it goes on, and the page made from it."""
