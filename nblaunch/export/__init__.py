"""Cells as a script for torchrun."""
