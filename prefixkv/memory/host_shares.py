"""What the host pools of this machine have reserved of its memory, and not touched yet.

The system's figure of free memory falls as memory is touched, so two pools that read it would get
the same bytes. Each pool enters its untouched bytes in a locked file of its own. The kernel ends
the lock with the process. A forked child would keep the lock, so it closes the descriptors first.
Processes of one user that see the same folder share the figure; others' is counted in whole MiB.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from prefixkv.errors import ConfigError

_PLACES: Final = "/dev/shm", tempfile.gettempdir()
_NUMBER_BYTES: Final = 8
_fds: Final[set[int]] = set()  # of locks, which a child that is forked off must not keep
_forking: Final = threading.RLock()  # no fork between a change of `_fds` and what it stands for


class HostShare:
    """Bytes of one pool that are reserved and not touched yet: until `close`, its last reference or
    the process ends. Any thread may use it."""

    def __init__(self, path: str, fd: int, num_bytes: int) -> None:
        self._fd, self._pid = fd, os.getpid()
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end, path, fd, os.getpid())
        self.keep(num_bytes)

    def keep(self, num_bytes: int) -> None:
        """Reserve this many bytes from now on: the rest is touched, or not needed."""
        if os.getpid() != self._pid:  # it is a fork, and the share is its parent's
            return
        with self._lock:  # else `close` may give the descriptor to another file meanwhile
            if self._end.alive:
                os.pwrite(self._fd, num_bytes.to_bytes(_NUMBER_BYTES, "little"), 0)

    def close(self) -> None:
        if os.getpid() == self._pid:
            with self._lock:
                self._end()


class HostShares:
    """The shares of all host pools, which do not change while `locked` goes on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_bytes = sum(self._bytes_of(path) for path in folder.glob("share-*"))

    def enter(self, num_bytes: int) -> HostShare:
        with _forking:
            fd, path = tempfile.mkstemp(prefix=_mine(), dir=self._folder)
            _fds.add(fd)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return HostShare(path, fd, num_bytes)

    def _bytes_of(self, path: Path) -> int:
        """0, without the file, if its process is gone."""
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # closed meanwhile
            return 0
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            num_bytes = int.from_bytes(os.read(fd, _NUMBER_BYTES), "little")
            return num_bytes if path.name.startswith(_mine()) else num_bytes >> 20 << 20
        else:
            path.unlink(missing_ok=True)
            return 0
        finally:
            os.close(fd)


@contextmanager
def locked() -> Iterator[HostShares]:
    """Let no other pool of this machine reserve memory meanwhile. Raises ConfigError where there is
    no folder for it."""
    folder = _folder()
    with _forking:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        _fds.add(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield HostShares(folder)
    finally:
        _close(fd)


def _folder() -> Path:
    for place in _PLACES:
        folder = Path(place, f"prefixkv-host-{os.getuid()}")
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            # Another user may have made something of this name.
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                return folder
    raise ConfigError(
        f"host_memory: no folder of this user can be made in {' or '.join(_PLACES)}, in which "
        "workers of this machine say what they reserve"
    )


def _mine() -> str:
    return f"share-{os.getpid()}-"


def _end(path: str, fd: int, pid: int) -> None:
    if os.getpid() == pid:
        with suppress(OSError):
            os.unlink(path)
        _close(fd)


def _close(fd: int) -> None:
    with _forking:
        if fd in _fds:  # else this is a fork, which has closed it
            _fds.remove(fd)
            os.close(fd)


def _begin_child() -> None:
    """Close what would keep the locks of the parent."""
    for fd in _fds:
        os.close(fd)
    _fds.clear()
    _forking.release()


os.register_at_fork(
    before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_begin_child
)
