"""Everything that runs inside a rank."""
