"""Hooks and references that do not keep a model alive, guards of parameters, and replaced names of other packages."""
