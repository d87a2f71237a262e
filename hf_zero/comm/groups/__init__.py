"""Which ranks belong together, and the process groups made for them."""
