"""Model folders with a model card, pushed to the Hub."""
