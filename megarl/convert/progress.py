"""The bar of a conversion: what is being done, how much of it, and how long it will still take. Without torch."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megarl.convert.job import Message


class ConversionProgress:
    """Shows one line a phase."""

    def __init__(self, console: Console, title: str, writes_bytes: int) -> None:
        """writes_bytes: size of what is to be written."""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._title, self._writes_bytes = title, writes_bytes
        self._task = self._progress.add_task(f"{title}: starting", total=None)
        self.phase = "starting"

    def __enter__(self) -> ConversionProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def hear(self, message: Message) -> None:
        """Take in what the first rank says."""
        if message.kind == "phase":
            self._end_phase()
            self.phase = message.text
            total = self._writes_bytes if message.text == "writing" else message.total or None
            self._task = self._progress.add_task(f"{self._title}: {message.text}", total=total)
        elif message.kind == "progress":
            self._progress.update(self._task, completed=message.done)

    def written(self, num_bytes: int) -> None:
        """How much is on the disk."""
        self._progress.update(self._task, completed=min(num_bytes, self._writes_bytes))

    def done(self) -> None:
        """Everything went well."""
        self._end_phase()

    def _end_phase(self) -> None:
        [task] = [task for task in self._progress.tasks if task.id == self._task]
        total = task.total or 1
        self._progress.update(self._task, total=total, completed=total)
