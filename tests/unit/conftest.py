"""Tests that start no process: what they could leave behind is in this process alone."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def leaves_nothing_behind(unchanged_process):
    """Replace the check of all processes and file systems, which takes longer than most of these tests."""
