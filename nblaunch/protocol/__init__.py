"""Typed messages between processes, and the pure folds over them."""
