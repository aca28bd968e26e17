"""Which of the ranks' output is shown; all of it is kept in files, and in the result."""

from __future__ import annotations

from dataclasses import dataclass

from nblaunch.options.kinds import streams_of
from nblaunch.options.launch import LaunchOptions

_BITS = {"stdout": 1, "stderr": 2}


@dataclass(frozen=True, slots=True)
class OutputFilter:
    """The options `--redirects`, `--tee` and `--local-ranks-filter`, all with torchrun's meaning."""

    redirects: str = "0"
    tee: str = "0"
    local_ranks: frozenset[int] | None = None

    @classmethod
    def of(cls, options: LaunchOptions) -> OutputFilter:
        """Return the filter that these options describe."""
        some = options.local_ranks_filter
        return cls(options.redirects, options.tee, None if some is None else frozenset(some))

    def shows(self, local_rank: int, stream: str) -> bool:
        """Whether a stream of a local rank is shown.

        >>> OutputFilter(redirects="3", tee="0:1").shows(0, "stdout")
        True
        """
        if self.local_ranks is not None and local_rank not in self.local_ranks:
            return False
        bit = _BITS[stream]
        return not streams_of(self.redirects, local_rank) & bit or bool(
            streams_of(self.tee, local_rank) & bit
        )
