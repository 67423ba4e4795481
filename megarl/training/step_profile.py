"""What torch's profiler sees of one rank: a trace for chrome://tracing or Perfetto, and a table of its costliest operations."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import ProfilerActivity, profile, supported_activities

ROWS = 40  # of the table
WIDTH = 80  # of its names: kernels have long ones


class StepProfile:
    """Watches this process, all its threads and its device, from when it is made until `end`."""

    def __init__(self, *, memory: bool) -> None:
        """memory: also what is allocated and freed."""
        wanted = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        self._activities = [each for each in wanted if each in supported_activities()]
        self._profile = profile(activities=self._activities, record_shapes=True, profile_memory=memory)
        self._profile.start()

    def end(self, file: Path) -> str:
        """Write the trace, and beside it, as `.txt`, the table. What went wrong with that, or nothing: no run ends by it."""
        self._profile.stop()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(file))
            file.with_name(f"{file.name.partition('.')[0]}.txt").write_text(self._table())
        except (OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _table(self) -> str:
        """By the time of each operation itself, without those that it calls: on the device where there is one."""
        by = "self_device_time_total" if ProfilerActivity.CUDA in self._activities else "self_cpu_time_total"
        averages = self._profile.key_averages()
        return str(averages.table(sort_by=by, row_limit=ROWS, max_name_column_width=WIDTH)) + "\n"
