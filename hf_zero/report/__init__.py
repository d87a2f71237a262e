"""What a training run leaves behind to be looked at: a log while it goes on, and a page made of it."""
