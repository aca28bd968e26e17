"""torchelastic: rendezvous, agent thread, fork server, log files."""
