"""A client's salt is in nothing that is logged, measured, dumped or raised: a digest stands for
it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from prefixkv import Namespace
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import RadixKey
from prefixkv.decode.request import DecodeRequest
from prefixkv.errors import PrefixKVError
from prefixkv.kv_events.stream import BlockEvents
from prefixkv.request import Request
from prefixkv.runtime.metrics import NodeCollector
from prefixkv.stats import namespace_label
from tests.support.node_pair import tokens_of
from tests.support.patience import until
from tests.unit.runtime.conftest import MakePair

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
