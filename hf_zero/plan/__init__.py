"""What a configuration costs, from the layout alone."""
