"""Stage 3: modules whose parameters are gathered before their forward and dropped after it."""
