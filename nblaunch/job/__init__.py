"""What ranks run: the names a cell needs, and the pickles that carry them."""
