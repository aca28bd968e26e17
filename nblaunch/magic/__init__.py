"""The IPython magics."""
