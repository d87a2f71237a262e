"""Memory of a training run by kind and by phase, computed from the shapes of its model."""
