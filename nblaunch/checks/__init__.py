"""Checks of this machine and this process, before a run needs them."""
