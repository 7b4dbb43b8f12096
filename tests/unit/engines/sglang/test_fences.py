"""What an operator says in a folder, and what a rank says there."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixkv.config import ControlConfig, DecodeConfig, PrefillConfig
from prefixkv.engines.sglang import fences
from prefixkv.engines.sglang.fences import FENCES, FenceFolder
from prefixkv.engines.sglang.rooms import Receives, RoomSends
from prefixkv.errors import ConfigError
from prefixkv.protocol.ids import PeerId
from prefixkv.transfer import DecodeTransfers, KVPoll, PrefillTransfers
from tests.support.patience import until
from tests.support.processes import Command
from tests.unit.engines.sglang.conftest import PAGE, Memory, digest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fences, "POLL_EVERY_S", 0.0)
    made = tmp_path / "fences of one"
    made.mkdir(mode=0o700)
    return made


def prefill_child() -> None:
    """Sends the first of three pages of room 1, and goes on living."""
    transfers = PrefillTransfers(Memory(filled=True).pool, PrefillConfig("prefill-0"))
    sends = RoomSends(transfers, PAGE)
    send = sends.begin(1, digest("prompt"), 3 * PAGE)
    sends.announce(1, "decode-0", digest("prompt"))
    print(transfers.endpoint, *transfers.peer_id, flush=True)
    while True:
        sends.pump()
        if send.poll is KVPoll.WAITING_FOR_INPUT:
            sends.send(send, [1])
        time.sleep(0.01)


@pytest.fixture
def child() -> Iterator[Command]:
    program = "from tests.unit.engines.sglang.test_fences import prefill_child; prefill_child()"
    with Command(sys.executable, "-c", program) as process:
        yield process


@pytest.mark.slow
def test_pages_that_a_dead_process_held_come_back_when_the_operator_says_so(
    child: Command, folder: Path
) -> None:
    """It is killed, and nothing may prove that: as on another machine."""
    endpoint, name, incarnation = child.line().split()
    timing = ControlConfig(
        heartbeat_s=0.1, suspect_after_s=0.5, prove_death=False, fence_settle_s=0.05
    )
    target = Memory(filled=False)
    receives = Receives(DecodeTransfers(target.pool, DecodeConfig("decode-0", control=timing)))
    place = FenceFolder(str(folder), "decode-0")
    receive = receives.open(1, endpoint, 3 * PAGE, 0, [5, 6, 7], digest("prompt"), 1)

    def told() -> list[dict[str, object]]:
        receives.pump()
        place.poll(receives.transfers)
        found: list[dict[str, object]] = json.loads((folder / "decode-0.lost").read_text())
        return found

    assert told() == []
    until(lambda: told() == [] and target.buffers[0][5].any())
    until(lambda: receives.answers(endpoint))  # it counts as silent after half a second
    child.kill()
    until(told)
    (lost,) = told()
    assert lost["peer"] == name
    assert lost["life"] == f"{int(incarnation):x}"
    assert lost["held"] == 3
    assert not receives.answers(endpoint)
    assert receive.held
    (folder / FENCES).write_text(f"# prefill's machine is off\n{lost['peer']} {lost['life']}\n")
    until(lambda: told() == [] and not receive.held)
    assert receive.outcome is KVPoll.FAILED
    assert "was fenced" in receive.error
    receives.transfers.close()


class Asked:
    """What is asked of transfers, and no more: which lives are fenced."""

    def __init__(self) -> None:
        self.fenced: list[PeerId] = []

    def fence(self, peer: str, incarnation: int) -> None:
        self.fenced.append(PeerId(peer, incarnation))

    def lost_peers(self) -> dict[PeerId, tuple[str, int]]:
        return {PeerId("p one/1", 0x3F): ("suspect", 7)}


def test_lines_are_taken_once_and_what_is_none_is_passed_over(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, asked, file = FenceFolder(str(folder), "tp/1"), Asked(), folder / FENCES
    place.poll(asked)
    assert json.loads((folder / "tp_1.lost").read_text()) == [
        {"peer": "p one/1", "life": "3f", "why": "suspect", "held": 7}
    ]
    bad = ["prefill-1", "prefill-2 soon", "\xff", "prefill-3 -3f", f"prefill-4 {2**64:x}"]
    file.write_text("\n".join(["", "# all of rack 3", "p one/1   3f", *bad, ""]))
    place.poll(asked)
    assert asked.fenced == [PeerId("p one/1", 0x3F)]
    assert [line for line in caplog.messages if "is no name and life" in line] == [
        f"{file}: {line!r} is no name and life" for line in bad
    ]
    with file.open("a") as more:
        more.write("p one/1 40\n")
    place.poll(asked)
    file.unlink()
    place.poll(asked)
    file.write_text("p one/1 41\np one/1 3f\n")
    place.poll(asked)
    assert [peer.incarnation for peer in asked.fenced] == [0x3F, 0x40, 0x41]


def test_it_is_looked_at_once_a_second(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    place, asked = FenceFolder(str(tmp_path), "decode-0"), Asked()
    place.poll(asked)
    (tmp_path / FENCES).write_text("p 1\n")
    place.poll(asked)
    assert asked.fenced == []
    place._next_s -= fences.POLL_EVERY_S
    place.poll(asked)
    assert asked.fenced == [PeerId("p", 1)]


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=f"has mode {mode:o}"):
        FenceFolder(str(tmp_path), "decode-0")


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name, why in (("file", "no folder"), ("link", "no folder"), ("not", "No such file")):
        with pytest.raises(ConfigError, match=why):
            FenceFolder(str(tmp_path / name), "decode-0")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    os.chown(tmp_path, 4711, -1)
    with pytest.raises(ConfigError, match="belongs to user 4711"):
        FenceFolder(str(tmp_path), "decode-0")


@pytest.mark.parametrize("what", ["file", "link", "folder"])
def test_a_word_that_another_user_could_have_written_is_not_taken(
    folder: Path, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    place, asked, file = FenceFolder(str(folder), "decode-0"), Asked(), folder / FENCES
    if what == "link":
        (tmp_path / "elsewhere").write_text("p 1\n")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.write_text("p 1\n")
        (file if what == "file" else folder).chmod(0o622 if what == "file" else 0o720)
    place.poll(asked)
    assert asked.fenced == []
    assert "is not read" in caplog.text
    assert (folder / "decode-0.lost").is_file()


def test_a_folder_that_is_gone_ends_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    place, asked = FenceFolder(str(folder), "decode-0"), Asked()
    folder.rmdir()
    place.poll(asked)
    assert "fence_folder: " in caplog.text
    folder.mkdir(mode=0o700)
    (folder / FENCES).write_text("p 1\n")
    place.poll(asked)
    assert asked.fenced == [PeerId("p", 1)]
