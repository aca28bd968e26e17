"""What travels between the notebook and its ranks: names, values, identities."""
