"""What a Trainer does differently when it trains with an engine: checkpoints, resuming, logging, pushing."""
