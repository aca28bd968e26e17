"""The hub, the rank group and the run."""
