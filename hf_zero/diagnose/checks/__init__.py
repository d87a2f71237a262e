"""What `hf-zero doctor` looks at, one subject a file."""
