"""`nblaunch.step()` counts the training steps of a rank."""

from __future__ import annotations

import pytest

import nblaunch
from nblaunch import NblaunchError

pytestmark = pytest.mark.quick


def test_steps_are_counted_in_each_job_of_a_session():
    def train():
        first = [nblaunch.step() for _ in range(3)]
        return [*first, nblaunch.step(10), nblaunch.step()]

    with nblaunch.Session(2) as session:
        assert session.run(train).values == [[0, 1, 2, 10, 11]] * 2
        assert session.run(train).values == [[0, 1, 2, 10, 11]] * 2


def test_a_step_outside_of_a_rank_says_where_it_belongs():
    with pytest.raises(NblaunchError, match=r"nblaunch\.step was called in a process that is not a rank"):
        nblaunch.step()
