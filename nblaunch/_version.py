"""The version, where every layer may read it: the package itself imports the magics."""

__version__ = "0.1.0"
