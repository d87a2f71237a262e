"""The files of a checkpoint: manifest, safetensors headers and data, read without trusting them."""
