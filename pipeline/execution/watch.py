"""Where a rank is in its row."""

from __future__ import annotations

from pipeline.plan import Action


class Watch:
    """Knows which action runs."""

    def __init__(self) -> None:
        self.position: int | None = None

    def enter(self, position: int, action: Action) -> None:
        """An action starts."""
        self.position = position

    def leave(self) -> None:
        """The step is over."""
        self.position = None
