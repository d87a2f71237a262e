"""From a model, its optimizers and the settings to the parts of an engine."""
