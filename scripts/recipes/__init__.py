"""What the fine-tuning scripts beside this package share, one concern a file."""
