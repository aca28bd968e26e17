"""torchelastic and processes: agent, rendezvous, fork server, log files."""
