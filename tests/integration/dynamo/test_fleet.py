"""Two decode workers with real trees publish to Dynamo's indexer and its selection service, through
evictions, flushes, a kill and a stop; what the services say of a prompt is what the trees say.

`PREFIXKV_ENGINE_PYTHON` is the interpreter of `python -m benchmarks env dynamo`. A service that
does not start is skipped aloud.
"""

import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.integration.dynamo.services import Indexer, NotStartedError, Process, Selector
from tests.integration.dynamo.worker import PAGE_SIZE
from tests.support.patience import PATIENCE_S, lasting_address, until

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("PREFIXKV_ENGINE_PYTHON", "")
STOP_S = 30.0
ROUNDS = 1_300  # operations of a worker between two comparisons
AS_FAST_AS_IT_GOES = 1e9

Prompt = dict[str, Any]


class Worker(Process):
    """Takes one order at a time; `begin` does not wait for its end."""

    def __init__(
        self, number: int, chats: list[Prompt], folder: Path, queue_batches: int, **config: Any
    ) -> None:
        self.number = number
        super().__init__(
            [sys.executable, "-m", "tests.integration.dynamo.worker"],
            folder / f"worker-{number}.log",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self.begin(name=f"decode-{number}", chats=chats, queue_batches=queue_batches, config=config)
        self.where: dict[str, str] = self.end()
        self.num_operations = 0

    def begin(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def end(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-2000:]
        return json.loads(line)

    def ask(self, **order: Any) -> Any:
        self.begin(**order)
        return self.end()


class Tap(threading.Thread):
    """Hears all that is published, for vLLM's decoder."""

    def __init__(self, endpoints: list[str]) -> None:
        super().__init__(daemon=True)
        self.payloads: list[bytes] = []
        self.closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, 0)
        self._sub.subscribe("kv@")
        for endpoint in endpoints:
            self._sub.connect(endpoint)
        self.start()

    def run(self) -> None:
        while not self.closing:
            if self._sub.poll(100):
                topic, number, payload = self._sub.recv_multipart()
                assert topic.startswith(b"kv@decode-")
                assert len(number) == 8
                self.payloads.append(payload)
        self._context.destroy(linger=0)


class Fleet:
    """Both services and both workers."""

    def __init__(self, folder: Path) -> None:
        chance = random.Random(12)
        system = [chance.randrange(150_000) for _ in range(320)]
        self.chats: list[Prompt] = [
            {
                "tokens": system + [chance.randrange(150_000) for _ in range(1_280)],
                "lora": chance.choice([None, None, "legal"]),
                "salt": chance.choice([None, None, "tenant-a"]),
            }
            for _ in range(60)
        ]
        # Also prompts that leave a chat in the middle, and chats in another's namespace.
        self.prompts = list(self.chats)
        for _ in range(140):
            chat = chance.choice(self.chats)
            other = [chance.randrange(150_000) for _ in range(64)]
            self.prompts.append(
                {
                    "tokens": chat["tokens"][: chance.randrange(16, 1_600)] + other,
                    "lora": chance.choice([chat["lora"], None, "legal"]),
                    "salt": chance.choice([chat["salt"], None]),
                }
            )
        self.folder = folder
        self.services = [Indexer(PYTHON, folder)]
        try:
            self.services.append(Selector(PYTHON, folder))
        except BaseException:
            self.services[0].close()
            raise
        self.workers = [self.worker(1), self.worker(2, queue_batches=20, keep_batches=30)]
        for service in self.services:
            for worker in self.workers:
                service.register(worker.number, worker.where, PAGE_SIZE)
        self.tap = Tap([worker.where["endpoint"] for worker in self.workers])
        self.num_operations = 0
        self.evicted_pages = 0

    def worker(self, number: int, queue_batches: int = 10_000, **config: Any) -> Worker:
        names = ("endpoint", "replay_endpoint", "snapshot_endpoint")
        where = {name: lasting_address() for name in names}  # one that comes back is there again
        config = where | {"heartbeat_s": 0.3} | config
        return Worker(number, self.chats, self.folder, queue_batches, **config)

    def run(
        self, per_second: float = AS_FAST_AS_IT_GOES, rounds: int = ROUNDS, flushes: float = 0.003
    ) -> None:
        """Operations of both workers at once."""
        for worker in self.workers:
            seed = self.num_operations + worker.number
            worker.begin(
                do="run", num_operations=rounds, seed=seed, per_second=per_second, flushes=flushes
            )
        for worker in self.workers:
            self.evicted_pages += worker.end()
            self.num_operations += rounds

    def disagreements(self) -> list[str]:
        """Between trees and services, prompt by prompt."""
        held = {
            str(worker.number): worker.ask(do="match", prompts=self.prompts)
            for worker in self.workers
        }
        assert all(one["pages"] > 500 for one in held.values()), "the trees are nearly empty"
        wrong = []
        for number, prompt in enumerate(self.prompts):
            truth = {name: one["found"][number] for name, one in held.items()}
            truth = {name: num_tokens for name, num_tokens in truth.items() if num_tokens}
            for service in self.services:
                if (found := service.found(prompt)) != truth:
                    kind = type(service).__name__
                    wrong.append(f"{kind}, prompt {number}: {found}, the trees have {truth}")
        return wrong

    def check(self) -> None:
        """They agree on all prompts, once all that was published has been heard."""
        until(lambda: not self.disagreements(), state=self.disagreements, pause_s=0.3)

    def close(self) -> None:
        self.tap.closing = True
        self.tap.join()
        for process in (*self.workers, *self.services):
            process.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    assert PYTHON, "PREFIXKV_ENGINE_PYTHON is not set"
    try:
        made = Fleet(tmp_path_factory.mktemp("fleet"))
    except NotStartedError as error:
        pytest.skip(f"a service of Dynamo did not start: {error}")
    try:
        yield made
    finally:
        made.close()


def test_services_and_trees_agree_under_load(fleet: Fleet) -> None:
    fleet.run()
    fleet.check()
    assert fleet.evicted_pages > 1_000


def test_they_agree_after_subscribers_were_stopped(fleet: Fleet) -> None:
    """For long enough that what waits for them was dropped: of worker 2 little is kept."""
    for service in fleet.services:
        service.signal(signal.SIGSTOP)
    answered = fleet.workers[1].ask(do="stats")["replays"]
    begun_s = time.monotonic()
    # No flush mends what was missed.
    fleet.run(flushes=0)
    fleet.run(flushes=0, per_second=ROUNDS / STOP_S)
    assert time.monotonic() - begun_s >= STOP_S - 0.1
    for service in fleet.services:
        service.signal(signal.SIGCONT)
    fleet.check()
    assert fleet.workers[1].ask(do="stats")["replays"] >= answered + len(fleet.services)


def test_they_agree_after_a_worker_was_killed(fleet: Fleet) -> None:
    """It comes back empty at its former addresses, under its name; nobody tells the services."""
    killed = fleet.workers[0]
    killed.begin(do="run", num_operations=10**9, seed=3, per_second=1e9, flushes=0)
    time.sleep(1.0)
    killed.close()
    names = {"endpoint": "endpoint", "replay": "replay_endpoint", "snapshot": "snapshot_endpoint"}
    config = {names[name]: address for name, address in killed.where.items()}
    fleet.workers[0] = fleet.worker(1, **config)
    # So few that it has published less than before, and no flush mends what is wrong.
    fleet.run(rounds=50, flushes=0)
    fleet.check()


def test_what_it_selects_is_the_worker_that_has_most(fleet: Fleet) -> None:
    selector = fleet.services[1]
    assert isinstance(selector, Selector)
    chosen = 0
    for prompt in fleet.prompts:
        found = {name: tokens for name, tokens in selector.found(prompt).items() if tokens > 320}
        answer = selector.select(prompt)
        if len(found) == 1:
            chosen += 1
            assert {str(answer["worker_id"])} == found.keys()
    assert chosen > 5


def test_ten_thousand_operations_in_all(fleet: Fleet) -> None:
    fleet.run(rounds=max(ROUNDS, (10_000 - fleet.num_operations) // 2 + 1))
    fleet.check()
    assert fleet.num_operations >= 10_000


def test_vllm_s_decoder_read_every_batch(fleet: Fleet) -> None:
    payloads = fleet.tap.payloads.copy()
    raw = b"".join(struct.pack(">I", len(one)) + one for one in payloads)
    script = Path(__file__).with_name("vllm_decoder.py")
    done = subprocess.run(
        [PYTHON, str(script)], input=raw, capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert not done.returncode, done.stderr.decode()[-2000:]
    counts = json.loads(done.stdout)
    assert counts["batches"] == len(payloads) > 1_000
    assert counts["AllBlocksCleared"] > 5
    assert counts["BlockRemoved"] > 500
    assert counts["blocks"] > 20_000
