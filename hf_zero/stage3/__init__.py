"""Stage 3: units that are gathered for their forward and backward, and freed afterwards."""
