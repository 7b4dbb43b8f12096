"""A connector that writes down every call that vLLM makes of its scheduler's side, and what came of
it: `tests/unit/engines/vllm/recorded.json` is made of it by `record.py`.

`PREFIXKV_RECORD` is the file: a line of JSON a call. Steps in which nothing happened are left out.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

from prefixkv.engines.vllm.connector import PrefixKVConnector

REQUEST = (
    "request_id",
    "kv_transfer_params",
    "prompt_token_ids",
    "num_prompt_tokens",
    "cache_salt",
    "abort_immediately",
)


class RecordingConnector(PrefixKVConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._lines = None
        if self._scheduler is not None:
            self._lines = open(os.environ["PREFIXKV_RECORD"], "w", buffering=1)  # noqa: SIM115
            self._hashes: dict[Any, int] = {}

    def _write(self, call: str, **what: Any) -> None:
        assert self._lines is not None
        made = {
            key: value.hex() if isinstance(value, bytes) else value for key, value in what.items()
        }
        self._lines.write(json.dumps({"call": call, **made}, default=_plain) + "\n")

    def on_new_request(self, request: Any) -> None:
        said = {name: getattr(request, name) for name in REQUEST}
        hashes = [self._hashes.setdefault(one, len(self._hashes)) for one in request.block_hashes]
        self._write("new", block_hashes=hashes, **said)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        result = super().get_num_new_matched_tokens(request, num_computed_tokens)
        rid = request.request_id
        self._write("matched", rid=rid, computed=num_computed_tokens, result=list(result))
        return result

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        (pages,) = blocks.get_block_ids()
        what = {"rid": request.request_id, "pages": list(pages), "external": num_external_tokens}
        self._write("allocated", **what)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        out = scheduler_output
        again = out.scheduled_cached_reqs
        tables = {
            rid: list(out.kv_connector_block_state.get_block_ids(rid)[0])
            for rid in out.num_scheduled_tokens
        }
        result = super().build_connector_meta(scheduler_output)
        if tables or result:
            self._write(
                "orders",
                new=[[one.req_id, one.num_computed_tokens] for one in out.scheduled_new_reqs],
                again=[
                    list(one) for one in zip(again.req_ids, again.num_computed_tokens, strict=True)
                ],
                scheduled=out.num_scheduled_tokens,
                tables=tables,
                result=asdict(result),
            )
        return result

    def update_connector_output(self, connector_output: Any) -> None:
        news = connector_output.kv_connector_worker_meta
        received = sorted(connector_output.finished_recving or ())
        if news or received:
            self._write("heard", news=None if news is None else asdict(news), received=received)
        super().update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        result = super().request_finished(request, block_ids)
        rid, pages = request.request_id, list(block_ids)
        self._write("finished", rid=rid, pages=pages, result=result[1], busy=self.scheduler.busy)
        return result


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else list(value)
