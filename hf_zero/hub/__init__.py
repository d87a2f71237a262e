"""Uploads the model of a run to the Hub with a model card: either each checkpoint of a Trainer, or one folder.

Trainer's `push_to_hub` and the command `hf-zero push` use this package. The tests are in `tests/hub/`.
"""
