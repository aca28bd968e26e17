"""State drawn as text, static HTML or a live widget."""
