"""Solvers fitted to a model, judged by its samples."""
