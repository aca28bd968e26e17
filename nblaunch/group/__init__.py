"""The worker group: hub, life of a job, sessions."""
