"""Uploads a run's model to the Hub, with a model card of the run: each checkpoint of Trainer's, or one folder.

Trainer's `push_to_hub` and the command `hf-zero push` ask for it. Its tests are in `tests/hub/`.
"""
