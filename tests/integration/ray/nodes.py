"""A Ray cluster of three nodes on this machine, as a process that takes orders on stdin, in the
interpreter of `python -m benchmarks env ray`.

Each node has an address of its own of the loopback interface. The head has no CPUs: workers are on
the other two.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from typing import Any

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster

from prefixkv.serving.cluster import Life, ended_on_node

NODE = {"object_store_memory": 80 << 20, "include_dashboard": False}
NOTICE = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}


class Nodes:
    """What is ordered."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ray-")  # short, since sockets are in it
        # Where Cluster notes its address, whatever `temp_dir` is; it does not make the folder.
        os.makedirs(get_default_ray_temp_dir(), exist_ok=True)
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                **NODE, "num_cpus": 0, "node_ip_address": "127.0.0.2", "temp_dir": self._folder,
                "_system_config": NOTICE,
            },
        )  # fmt: skip
        for number in (3, 4):
            self._cluster.add_node(num_cpus=2, node_ip_address=f"127.0.0.{number}", **NODE)
        ray.init(self._cluster.address, namespace="prefixkv/small", logging_level="ERROR")
        self._lives: dict[str, Life] = {}
        self._stopped: Any = None

    def address(self) -> str:
        return str(self._cluster.address)

    def found(self, name: str) -> dict[str, Any]:
        """The worker of that name as Ray finds it."""
        life = ray.get(ray.get_actor(name).life.remote())
        self._lives[life.info.life] = life
        return {"life": life.info.life, "pid": life.info.pid, "node": life.node}

    def has_ended(self, life: str) -> bool:
        """Of one that was found."""
        return asyncio.run(ended_on_node(self._lives[life]))

    def lose_node_of(self, life: str) -> int:
        """The raylet of its node is not heard any more. It and its processes live."""
        node = next(
            node for node in self._cluster.worker_nodes if node.node_id == self._lives[life].node
        )
        (raylet,) = node.all_processes["raylet"]
        os.kill(raylet.process.pid, signal.SIGSTOP)
        self._stopped = node
        return int(raylet.process.pid)

    def close(self) -> None:
        ray.shutdown()
        if self._stopped is not None:  # it would not end by itself
            self._cluster.remove_node(self._stopped, allow_graceful=False)
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def _answer(what: Any) -> None:
    print("ANSWER " + json.dumps(what), flush=True)  # Ray prints too


def main() -> None:
    nodes = Nodes()
    _answer(nodes.address())
    try:
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            _answer(getattr(nodes, name)(*arguments))
    finally:
        nodes.close()


if __name__ == "__main__":
    main()
