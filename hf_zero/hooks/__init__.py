"""Hooks and references which do not keep a model alive, guards of parameters, and replaced names of other packages."""
