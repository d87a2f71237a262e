"""Sharded state on disk: rows of (kind, name, interval, tensor) in safetensors files, described by a JSON manifest."""
