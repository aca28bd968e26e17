"""Where agents run beside the notebook's own: nodes that join it."""
