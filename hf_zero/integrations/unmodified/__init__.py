"""Training scripts that are run with the engine as they are."""
