"""Engines and Hugging Face model folders: saving, loading, and the formats of other engines."""
