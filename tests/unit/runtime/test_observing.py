"""What an operator sees of two real nodes: metrics as scraped, the request log, cache events,
against what happened. A client's salt is in none of it: a digest stands for it."""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import prefixkv
from prefixkv import DecodeNode, Namespace, PrefillNode
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import RadixKey
from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import PrefixKVError
from prefixkv.kv_events.stream import BlockEvents
from prefixkv.request import Request
from prefixkv.runtime import metrics
from prefixkv.runtime.metrics import NodeCollector
from prefixkv.stats import namespace_label
from tests.support.gates import Gate
from tests.support.node_pair import NodePair, make_pool, tokens_of
from tests.support.patience import until
from tests.unit.decode.desk import Desk
from tests.unit.runtime.conftest import QUICK, MakePair


class Scrape:
    """One scrape of both nodes: `get("decode", "hit_tokens_total", namespace="")`."""

    def __init__(self, pair: NodePair) -> None:
        self._names = {"decode": pair.decode.peer_id.name, "prefill": pair.prefill.peer_id.name}
        registry = CollectorRegistry(auto_describe=True)
        registry.register(NodeCollector(pair.decode, pair.prefill))
        self._values = parsed(generate_latest(registry).decode())

    def get(self, side: str, name: str, **labels: str) -> float:
        return self._values[
            f"prefixkv_{name}", frozenset({"node": self._names[side], **labels}.items())
        ]

    def labels(self, name: str) -> list[dict[str, str]]:
        return [dict(labels) for metric, labels in self._values if metric == f"prefixkv_{name}"]


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample once, by name and labels."""
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(values) == len(samples)
    return values


def submit(pair: NodePair, rid: str, tokens: np.ndarray[Any, Any], **options: Any) -> None:
    pair.submit(rid, tokens, max_new_tokens=2, **options)


def test_a_scrape_says_what_happened(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    began_s, pair = time.monotonic(), make_pair(decode={"reserve_tokens": 0})
    page_bytes = pair.decode.pool.layout.page_bytes
    submit(pair, "miss", tokens_of(1, 40))
    pair.run("miss")
    submit(pair, "hit", tokens_of(1, 54))
    pair.run("hit")
    pair.p.hold = True
    submit(pair, "first", tokens_of(2, 20))
    submit(pair, "second", tokens_of(2, 20))
    submit(pair, "holder", tokens_of(1, 41))
    pair.until(lambda: len(pair.p.computing) == 3)
    scrape = Scrape(pair)
    assert scrape.get("decode", "queue_requests", queue="transfer") == 3
    assert scrape.get("prefill", "queue_requests", queue="compute") == 3
    assert scrape.get("decode", "locks") == 3
    assert scrape.get("decode", "protected_pages") == 10
    assert 0 < scrape.get("decode", "oldest_lock_age_seconds") < time.monotonic() - began_s
    assert scrape.labels("oldest_lock_info") == []
    monkeypatch.setattr(metrics, "NAME_AFTER_S", 0.0)
    assert {"node": pair.decode.peer_id.name, "rid": "holder"} in Scrape(pair).labels(
        "oldest_lock_info"
    )
    pair.p.hold = False
    pair.run("first", "second", "holder")

    scrape = Scrape(pair)
    assert scrape.get("decode", "prompt_tokens_total", namespace="") == 40 + 54 + 20 + 20 + 41
    assert scrape.get("decode", "hit_tokens_total", namespace="") == 40 + 40
    assert scrape.get("decode", "shared_tokens_total", namespace="") == 20
    assert scrape.get("decode", "shared_flights_total") == 1
    assert 0.4 < scrape.get("decode", "recent_hit_ratio", namespace="") < 0.5
    sent_pages = 10 + 4 + 5 + 1
    assert scrape.get("prefill", "sent_bytes_total") == sent_pages * page_bytes
    assert scrape.get("decode", "received_bytes_total") == sent_pages * page_bytes
    for side in ("decode", "prefill"):
        assert scrape.get(side, "skipped_bytes_total") == (10 + 5 + 10) * page_bytes
        assert scrape.get(side, "peers", state="ready") == 1
        assert scrape.get(side, "locks") == scrape.get(side, "rooms") == 0
    assert (
        scrape.get("decode", "transfers_total", peer=pair.prefill.endpoint, outcome="success") == 5
    )
    assert (
        scrape.get("prefill", "transfers_total", peer=pair.decode.peer_id.name, outcome="success")
        == 5
    )
    assert scrape.get("decode", "requests_total", outcome="finished") == 5
    assert scrape.get("prefill", "requests_total", outcome="sent") == 5
    stats = pair.decode.stats()
    for state in ("free", "owned", "cached", "held", "quarantined"):
        assert scrape.get("decode", "pages", state=state) == stats[f"pages_{state}"]
    for reason, count in {
        "pages": 5,
        "transfer": 5,
        "flight": 1,
        "engine": 5,
        "first_token": 5,
    }.items():
        assert scrape.get("decode", "wait_seconds_count", reason=reason) == count
        assert scrape.get("decode", "wait_seconds_bucket", reason=reason, le="+Inf") == count
    for reason in ("decode", "pages", "compute", "send"):
        assert scrape.get("prefill", "wait_seconds_count", reason=reason) == 5
    assert scrape.get("decode", "wait_seconds_sum", reason="first_token") >= scrape.get(
        "decode", "wait_seconds_sum", reason="transfer"
    )


def test_queues_by_what_is_waited_for() -> None:
    desk = Desk(num_pages=9)
    node: Any = desk.scheduler

    def queues() -> dict[str, float]:
        return {queue: length for (queue,), length in metrics._decode_queues(node) if length}

    first, second = desk.add("a1", 12), desk.add("a2", 12)
    assert queues() == {"pages": 2}
    desk.admit()
    desk.add("large", 28)
    desk.admit()
    assert queues() == {"pages": 1, "transfer": 2}
    desk.succeed(second.room_key)
    assert queues() == {"pages": 1, "transfer": 1, "flight": 1}
    desk.succeed(first.room_key)
    assert queues() == {"pages": 1, "commit": 1, "flight": 1}
    desk.transferred()
    assert queues() == {"pages": 1, "running": 2}
    desk.finish(first, after=Gate())
    assert queues() == {"pages": 1, "running": 1, "device": 1}


def test_scrapes_from_another_thread_while_requests_run(pair: NodePair) -> None:
    """None fails, counters never fall, and what runs does not notice."""
    seen: list[float] = []
    failures: list[BaseException] = []
    done, name = threading.Event(), pair.decode.peer_id.name

    def scrape_on() -> None:
        try:
            while not done.is_set():
                scrape = Scrape(pair)
                labels, get = scrape.labels("prompt_tokens_total"), scrape.get
                names = [one["namespace"] for one in labels if one["node"] == name]
                seen.append(sum(get("decode", "prompt_tokens_total", namespace=n) for n in names))
        except BaseException as error:
            failures.append(error)

    scraper = threading.Thread(target=scrape_on)
    scraper.start()
    try:
        rids = [f"r{number}" for number in range(40)]
        for number, rid in enumerate(rids):
            submit(pair, rid, tokens_of(number % 7, 20 + number))
        pair.run(*rids)
        pair.until(lambda: bool(failures) or len(seen) > 2)
    finally:
        done.set()
        scraper.join()
    assert failures == []
    assert seen == sorted(seen)
    assert Scrape(pair).get("decode", "prompt_tokens_total", namespace="") == sum(
        20 + n for n in range(40)
    )


def test_two_collectors_of_one_registry_are_refused_and_a_closed_node_has_no_metrics() -> None:
    registry = CollectorRegistry(auto_describe=True)
    with PrefillNode(make_pool(), PrefillConfig(control=QUICK)) as prefill:
        with DecodeNode(make_pool(), DecodeConfig(control=QUICK)) as decode:
            registry.register(NodeCollector(decode))
            with pytest.raises(ValueError, match="Duplicated"):
                registry.register(NodeCollector(prefill))
            assert b'node="decode-0"' in generate_latest(registry)
        assert generate_latest(registry) == b""


def test_one_record_a_request_on_either_side(
    pair: NodePair, caplog: pytest.LogCaptureFixture
) -> None:
    submit(pair, "quiet", tokens_of(1, 40))
    pair.run("quiet")
    heard: list[tuple[dict[str, Any], float]] = []
    for node in (pair.decode, pair.prefill):
        node.on_ended(lambda record, arrived_s: heard.append((record, arrived_s)))
    before_s = time.monotonic()
    with caplog.at_level(logging.INFO, logger="prefixkv.requests"):
        submit(pair, "a", tokens_of(1, 54), room=77)
        pair.run("a")
        pair.p.hold = True
        submit(pair, "b", tokens_of(2, 20))
        pair.until(lambda: "b" in pair.p.computing)
        pair.decode.abort("b")
        pair.until(lambda: "b" in pair.p.failed)  # else it may be sent before prefill hears of it
        pair.run("b")
    records = [json.loads(record.getMessage()) for record in caplog.records]
    assert [record.request for record in caplog.records] == records  # type: ignore[attr-defined]
    # Listeners get the same, and the time on the clock that a process's own times are of.
    assert [record for record, _ in heard] == records
    for record, arrived_s in heard:
        assert before_s <= arrived_s <= arrived_s + record["ended_s"] <= time.monotonic()
    by = {(record["side"], record["rid"]): record for record in records}
    assert len(by) == len(records) == 4
    decode, prefill = by["decode", "a"], by["prefill", "a"]
    assert decode["room"] == prefill["room"] == 77
    assert (decode["node"], decode["incarnation"]) == pair.decode.peer_id
    assert (decode["peer"], prefill["peer"]) == (pair.prefill.endpoint, pair.decode.peer_id.name)
    assert decode["outcome"], prefill["outcome"] == ("finished", "sent")
    assert decode["hit_tokens"] == prefill["decode_hit_tokens"] == 40
    assert decode["asked_bytes"] == prefill["sent_bytes"] == 4 * pair.decode.pool.layout.page_bytes
    steps = [
        decode[f"{name}_s"]
        for name in ("admitted", "transferred", "committed", "first_token", "ended")
    ]
    assert steps == sorted(steps)
    steps = [prefill[f"{name}_s"] for name in ("promised", "started", "computed", "ended")]
    assert steps == sorted(steps)
    assert by["decode", "b"]["outcome"] == by["prefill", "b"]["outcome"] == "aborted"
    assert by["decode", "b"]["first_token_s"] is None
    assert by["decode", "b"]["error"].startswith("AbortedError")


def test_a_listener_gets_records_where_the_log_is_off_and_what_it_raises_is_counted(
    pair: NodePair,
) -> None:
    heard: list[str] = []

    def ended(record: dict[str, Any], arrived_s: float) -> None:
        heard.append(record["rid"])
        raise ValueError("of the listener")

    pair.decode.on_ended(ended)
    submit(pair, "a", tokens_of(1, 40))
    with pytest.raises(ValueError, match="of the listener"):
        pair.run("a")
    pair.run("a")
    assert heard == ["a"]
    assert pair.decode.stats()["user_errors"] == 1


def test_a_listener_costs_the_next_one_and_the_log_nothing(
    pair: NodePair, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []

    def takes_it_apart(record: dict[str, Any], arrived_s: float) -> None:
        record.clear()
        raise ValueError("of the listener")

    pair.decode.on_ended(takes_it_apart)
    pair.decode.on_ended(lambda record, _: heard.append(record["rid"]))
    submit(pair, "a", tokens_of(1, 40))
    with caplog.at_level(logging.INFO, logger="prefixkv.requests"):
        with pytest.raises(ValueError, match="of the listener"):
            pair.run("a")
        pair.run("a")
    logged = {json.loads(record.getMessage())["side"] for record in caplog.records}
    assert (heard, logged) == (["a"], {"decode", "prefill"})


def test_every_counter_is_in_the_stats_from_the_start(pair: NodePair) -> None:
    """Also one that the source counts somewhere and nobody has listed."""
    named = re.compile(r'counters\["(\w+)"\]')
    root = Path(prefixkv.__file__).parent
    sources: dict[str, Callable[[], dict[str, int]]] = {
        "decode": pair.decode.stats,
        "control/decode": pair.decode.stats,
        "prefill": pair.prefill.stats,
        "control/prefill": pair.prefill.stats,
    }
    for source, stats in sources.items():
        texts = [path.read_text(encoding="utf-8") for path in (root / source).glob("*.py")]
        counted = {name for text in texts for name in named.findall(text)}
        assert counted
        assert counted <= stats().keys(), f"{source} counts what its node does not list"
    fresh = [node.stats().keys() for node in (pair.decode, pair.prefill)]
    submit(pair, "a", tokens_of(1, 40))
    pair.run("a")
    assert [node.stats().keys() for node in (pair.decode, pair.prefill)] == fresh


SALT = "a salt that is a tenant's secret"
SALTED: list[Hashable] = [
    Namespace(salt=SALT),
    Namespace(lora="legal", salt=SALT, images=[("image", 0, 4)]),
    ("legal", SALT),  # as the adapters name them
    ("legal", SALT, (("image", 0, 4),)),
    SALT.encode(),
]


def dumped(namespace: Hashable) -> str:
    cache = RadixCache(page_size=1)
    cache.insert([1, 2, 3], [4, 5, 6], namespace=namespace)
    return cache.dump()


@pytest.mark.parametrize("namespace", SALTED)
@pytest.mark.parametrize(
    "said",
    [
        namespace_label,
        dumped,
        lambda namespace: repr(RadixKey([1, 2], namespace)),
        lambda namespace: repr(Request("r", [1, 2], room=1, namespace=namespace)),
        lambda namespace: f"{namespace} {namespace!r}" if type(namespace) is Namespace else "",
    ],
)
def test_what_shows_a_namespace_hides_its_salt(
    namespace: Hashable, said: Callable[[Hashable], str]
) -> None:
    assert SALT not in said(namespace)
    assert "legal" in repr(Namespace(lora="legal", salt=SALT))


REFUSED: list[Callable[[], object]] = [
    lambda: Request("r", RadixKey([1], Namespace(salt=SALT)), room=1, namespace=(SALT,)),
    lambda: Request("r", [1], room=1, namespace=[SALT]),
    lambda: Request("r", [1], room=1, namespace=(SALT, float("nan"))),
    lambda: RadixCache(page_size=1).match_prefix(RadixKey([1], (SALT,)), namespace=(SALT, 2)),
    lambda: RadixCache(page_size=1).match_prefix([1], [SALT]),  # type: ignore[arg-type]
    lambda: BlockEvents(16, "GPU").check((SALT,)),
    lambda: Namespace(salt=SALT + "\ud800"),
    lambda: Namespace(salt=[SALT]),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("refused", REFUSED)
def test_a_refusal_hides_the_salt(refused: Callable[[], object]) -> None:
    with pytest.raises(PrefixKVError) as caught:
        refused()
    assert SALT not in str(caught.value)


def test_two_salts_have_two_labels_and_one_has_one() -> None:
    labels = [namespace_label(Namespace(salt=salt)) for salt in (SALT, SALT, "another")]
    assert labels[0] == labels[1] != labels[2]
    assert namespace_label("legal") == "legal"


def test_two_nodes_say_no_salt(
    make_pair: MakePair, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """In metrics, stats, logs, the record of traffic, dumps and requests that have ended."""
    caplog.set_level(logging.DEBUG)
    pair = make_pair(decode={"record": str(tmp_path / "record.jsonl")})
    reqs: list[DecodeRequest] = []
    key = RadixKey(tokens_of(1, 40), Namespace(lora="legal", salt=SALT))
    for rid in ("first", "again"):
        reqs.append(pair.submit(rid, key))  # type: ignore[arg-type]
        pair.run(rid)
    said = [repr(req) + repr(req.request) for req in reqs]
    registry = CollectorRegistry(auto_describe=True)
    registry.register(NodeCollector(pair.decode, pair.prefill))
    scrape = generate_latest(registry).decode()
    said += [scrape, repr(pair.decode.stats()), repr(pair.prefill.stats()), caplog.text]
    said += [node.pages.cache.dump() for node in (pair.decode, pair.prefill)]
    (record,) = tmp_path.iterdir()
    until(record.read_text)
    said.append(record.read_text())
    assert "legal" in scrape
    assert np.count_nonzero([bool(text) for text in said]) == len(said)
    for text in said:
        assert SALT not in text
        assert "secret" not in text
