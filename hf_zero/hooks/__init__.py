"""Hooks and references that do not keep a model alive, guards of parameters, and names of other packages that are replaced."""
