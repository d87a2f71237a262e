"""The doors: accelerate, Trainer, and the objects and flags that open them."""
