"""From the backward hook to the clipped gradient that the optimizer steps on."""
