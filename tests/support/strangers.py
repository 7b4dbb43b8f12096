"""What an attack makes a process take."""

from __future__ import annotations


class Memory:
    """What a process takes more than when this was made, at its peak."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        with open(f"/proc/{pid}/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        self._before = self._field("VmRSS")

    def grown(self) -> int:
        """Bytes."""
        return self._field("VmHWM") - self._before

    def _field(self, name: str) -> int:
        with open(f"/proc/{self._pid}/status") as file:
            (line,) = [line for line in file if line.startswith(name)]
        return int(line.split()[1]) << 10
