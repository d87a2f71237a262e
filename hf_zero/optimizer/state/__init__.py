"""The user's optimizers over this rank's rows: their state, its kinds, and loss scaling."""
