"""Temporary."""
from nblaunch.session.run import Silent
def watcher(title, backend): return Silent()
