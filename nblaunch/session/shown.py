"""Which of the ranks' output is shown; all of it is kept in files, and in the result."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nblaunch._option_kinds_elastic import streams_of
from nblaunch._options import LaunchOptions
from nblaunch._protocol import Stream

_BITS = {Stream.STDOUT: 1, Stream.STDERR: 2}
_NAMES = ("redirects", "tee", "local_ranks_filter")


@dataclass(frozen=True, slots=True)
class Shown:
    """What `--redirects`, `--tee` and `--local-ranks-filter` say, all with torchrun's meaning."""

    redirects: str = "0"
    tee: str = "0"
    local_ranks: frozenset[int] | None = None

    @classmethod
    def of(cls, options: LaunchOptions) -> Shown:
        """Return what these options say."""
        some = options.local_ranks_filter
        return cls(options.redirects, options.tee, None if some is None else frozenset(some))

    def shows(self, local_rank: int, stream: Stream) -> bool:
        """Whether a stream of a local rank is shown.

        >>> Shown(redirects="3", tee="0:1").shows(0, Stream.STDOUT)
        True
        """
        if self.local_ranks is not None and local_rank not in self.local_ranks:
            return False
        bit = _BITS[stream]
        return not streams_of(self.redirects, local_rank) & bit or bool(
            streams_of(self.tee, local_rank) & bit
        )


EVERYTHING = Shown()


def with_those_of(own: LaunchOptions, session: LaunchOptions) -> LaunchOptions:
    """Return a cell's options, with what its session shows where the cell says nothing of it."""
    # With what `PET_` variables say, which a cell has not said itself.
    unasked = LaunchOptions.from_keywords()
    unsaid = {name: getattr(session, name) for name in _NAMES if getattr(own, name) == getattr(unasked, name)}
    return dataclasses.replace(own, **unsaid)
