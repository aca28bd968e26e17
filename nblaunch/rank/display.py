"""Rich output of a rank: `display(...)` and `clear_output()` become messages."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from IPython.core.displaypub import DisplayPublisher

from nblaunch._protocol import Cleared, Displayed, FromRank
from nblaunch.rank import streams

_WIDGET_TYPE = "application/vnd.jupyter.widget-view+json"


class _Outlet:
    """Where messages go, and for which rank; set once the rank is connected."""

    send: Callable[[FromRank], None] | None = None
    rank: int = 0


outlet = _Outlet()


class RankDisplayPublisher(DisplayPublisher):
    """Publishes to the notebook that started the run."""

    def publish(  # type: ignore[override]
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: object,
    ) -> None:
        """Send one display, its data as the Jupyter protocol has it."""
        if outlet.send is None:
            return
        if len(data) > 1:
            # A widget lives in this rank, where no front end finds it: what is shown is its text.
            data = {kind: content for kind, content in data.items() if kind != _WIDGET_TYPE}
        outlet.send(
            Displayed(
                rank=outlet.rank,
                data=_as_json(data),
                metadata=_as_json(metadata or {}),
                transient=_as_json(transient or {}),
                update=update,
                offsets=streams.offsets(),
            )
        )

    def clear_output(self, wait: bool = False) -> None:  # noqa: FBT001, FBT002 - IPython's signature
        """Clear this rank's output, at once or when the next output comes."""
        if outlet.send is not None:
            outlet.send(Cleared(rank=outlet.rank, wait=wait, offsets=streams.offsets()))


def _as_json(value: Any) -> Any:
    """Return `value` as JSON can hold it: bytes as base64, keys as text, the rest as its repr."""
    match value:
        case None | bool() | float():
            return value
        case int():
            # MessagePack has 64 bits for an integer.
            return value if abs(value) < 1 << 63 else float(value)
        case str():
            return value.encode("utf-8", "backslashreplace").decode("utf-8")
        case bytes() | bytearray() | memoryview():
            return base64.b64encode(value).decode("ascii")
        case dict():
            return {str(key): _as_json(item) for key, item in value.items()}
        case list() | tuple():
            return [_as_json(item) for item in value]
        case _:
            return repr(value)
