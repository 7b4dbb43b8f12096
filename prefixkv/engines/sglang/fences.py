"""A folder in which a server lists the peers that it has lost, and an operator names the dead ones.

A plug-in cannot extend SGLang's HTTP routes. So each rank writes what it holds for silent or dead
peers to `RANK.lost`, and reads `fences`: a line per dead process with its name and its life, as
`RANK.lost` and the log have them. A user that can write there decides which pages are used again,
so the folder must be accessible to its owner only.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import time
from pathlib import Path
from typing import Final, Protocol

from prefixkv.errors import ConfigError
from prefixkv.spi import PeerId

_log = logging.getLogger("prefixkv.sglang")

FENCES: Final = "fences"
_FENCE: Final = re.compile(r"(.*\S) +((?:0x)?[0-9a-f]{1,16})", re.IGNORECASE)
POLL_EVERY_S: Final = 1.0
MAX_BYTES: Final = 1 << 20
"""Limit of bytes of `fences` that are read; later lines are ignored."""


class FencedTransfers(Protocol):
    """The part of `DecodeTransfers` and `PrefillTransfers` that is used here."""

    def fence(self, peer: str, incarnation: int) -> None: ...

    def lost_peers(self) -> dict[PeerId, tuple[str, int]]: ...


class FenceFolder:
    """The view of one rank. All ranks, and any number of servers of one user, may share the folder.
    Owner: the scheduler's thread. Raises ConfigError for a folder that does not exist, or that
    other users than this process's may use."""

    def __init__(self, folder: str, rank: str) -> None:
        self._folder = Path(folder)
        if why := _open_to_others(self._folder, folder=True):
            raise ConfigError(f"fence_folder {folder!r} {why}")
        self._lost_path = self._folder / f"{rank.replace('/', '_')}.lost"
        self._written: str | None = None  # the last text of `RANK.lost`
        self._read: tuple[int, ...] = ()  # the version of `fences` that was read last
        self._fenced: set[PeerId] = set()
        self._next_s = float("-inf")

    def poll(self, transfers: FencedTransfers) -> None:
        """Cheap: looks once per second at most."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + POLL_EVERY_S
        try:
            for peer in self._read_fences():
                if peer not in self._fenced:
                    self._fenced.add(peer)
                    _log.warning("%s is fenced, as %s says", peer, self._folder / FENCES)
                    transfers.fence(*peer)
            self._write_lost(transfers.lost_peers())
        except OSError as error:  # the folder has changed under us; transfers must not suffer
            _log.warning("fence_folder: %s", error)

    def _read_fences(self) -> list[PeerId]:
        path = self._folder / FENCES
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            self._read = ()
            return []
        version = found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode, found.st_uid
        if version == self._read:
            return []
        self._read = version
        # Checked at each change, not only at the start: a line here frees pages without any proof,
        # so a user that may write it could have another's pages overwritten.
        why = _open_to_others(self._folder, folder=True) or _open_to_others(path, folder=False)
        if why:
            _log.warning("%s is not read: it, or its folder, %s", path, why)
            return []
        peers = []
        with path.open("rb") as file:
            text = file.read(MAX_BYTES)
        for line in text.decode(errors="replace").splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            if fence := _FENCE.fullmatch(line.strip()):
                peers.append(PeerId(fence[1], int(fence[2], 16)))
            else:
                _log.warning("%s: %r is no name and life", path, line[:200])
        return peers

    def _write_lost(self, lost: dict[PeerId, tuple[str, int]]) -> None:
        text = json.dumps(
            [
                {"peer": peer.name, "life": f"{peer.incarnation:x}", "why": why, "held": held}
                for peer, (why, held) in sorted(lost.items())
            ]
        )
        if text == self._written:
            return
        # Renamed into place, so that a reader never sees half a file. `_written` last: where the
        # write fails it is tried again.
        whole = self._lost_path.with_suffix(".lost.new")
        whole.write_text(text + "\n")
        whole.replace(self._lost_path)
        self._written = text


def _open_to_others(path: Path, *, folder: bool) -> str:
    """Return why others than this user and root could change a path; "" if they could not."""
    # `lstat`, not `stat`: a link could lead to a file of another user.
    try:
        found = os.lstat(path)
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(found.st_mode):
        return f"is no {'folder' if folder else 'file'}"
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {found.st_uid}, not to this process's, {os.geteuid()}"
    if found.st_mode & (0o077 if folder else 0o022):
        return f"has mode {stat.S_IMODE(found.st_mode):o}: it has to be its owner's alone"
    return ""
