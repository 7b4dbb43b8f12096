"""Every room ends on both sides, whatever HTTP does: a row for each body that a client may send and
for each event, through `prefixkv proxy` and two real vLLM servers.

In each row the answer is one vLLM's, nothing is held afterwards on the servers or the proxy,
and the next request is answered as ever. `rooms` has what is compared with what.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.vllm_servers import MODEL, Server
from tests.integration.vllm.rooms import (
    DECODE_LEN,
    NAMES,
    PATHS,
    Client,
    Json,
    Rooms,
    is_same,
    new_prompt,
)
from tests.integration.vllm.test_vllm import BLOCK, started, until

TOKENS, BLOCKS = 70, 3  # of a row's prompt
OUT = 4
BELOW = 8  # tokens that decode computes; all prompts but those of conversations lack more


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rooms]:
    with started(lambda: Rooms(tmp_path_factory.mktemp("rooms"), compute_below=BELOW)) as made:
        made.start()
        yield made
        print(f"the slowest room took {made.slowest_s:.2f} s to end")


def text_of(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def body_of(api: str, num_tokens: int = TOKENS, **more: Any) -> Json:
    """A request of a prompt that nobody has asked for yet."""
    tokens = new_prompt(num_tokens)
    prompt: Json = {"prompt": tokens}
    if api == "chat":
        prompt = {"messages": [{"role": "user", "content": text_of(tokens)}]}
    common = {"max_tokens": OUT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": MODEL, **prompt, **common, **more}


def check_after(rooms: Rooms) -> None:
    """Nothing is held, and the next request is answered as ever, by way of a room."""
    rooms.settled()
    before = rooms.blocks_sent()
    body = body_of("completions", BLOCK + 5)
    said = rooms.ask(PATHS["completions"], body).read()
    assert said.status == 200
    assert is_same(said.value, rooms.alone(PATHS["completions"], body).value)
    rooms.has_sent(before + 2)


@dataclass
class Row:
    """A body. `blocks` are those that prefill sends, None: it does not matter here."""

    name: str
    more: Json = field(default_factory=dict)
    status: int = 200
    blocks: int | None = BLOCKS
    tokens: int = TOKENS
    apis: tuple[str, ...] = ("completions",)


CHAT, BOTH = ("chat",), ("completions", "chat")


def check_body(rooms: Rooms, api: str, body: Json, row: Row) -> None:
    before = rooms.blocks_sent()
    computed = rooms.prefill.metrics()["vllm:prompt_tokens_total"]
    said = rooms.ask(PATHS[api], body).read()
    rooms.settled()
    alone = rooms.alone(PATHS[api], body)
    assert (said.status, alone.status) == (row.status, row.status), (said, alone)
    assert is_same(said.value, alone.value), (said.value, alone.value)
    assert not said.error
    if row.blocks is not None:
        rooms.has_sent(before + row.blocks)
        if not row.blocks:
            assert rooms.prefill.metrics()["vllm:prompt_tokens_total"] == computed
    check_after(rooms)


def rows_of(rows: list[Row]) -> Any:
    cases = [pytest.param(api, row, id=f"{api}: {row.name}") for row in rows for api in row.apis]
    return pytest.mark.parametrize(("api", "row"), cases)


# --- answers --------------------------------------------------------------------------------------

NEARLY_ALL: Json = {"tokens": DECODE_LEN - 20, "blocks": 16}
SAMPLES = {"temperature": 1.0, "top_k": 1}
ANSWERED = [
    Row("plain", apis=BOTH),
    Row("a stream", {"stream": True, "stream_options": {"include_usage": True}}, apis=BOTH),
    Row("no more than a block", tokens=BLOCK, blocks=1),
    Row("log-probabilities", {"logprobs": True, "top_logprobs": 3}, apis=CHAT),
    Row("log-probabilities, a stream", {"logprobs": 2, "stream": True}),
    Row("of chosen tokens", {"logprobs": 1, "logprob_token_ids": [5, 6]}),
    Row("echo and nothing else", {"echo": True, "max_tokens": 0}),
    Row("the least and the most", {"min_tokens": 4, "max_tokens": 4}),
    Row("the most of a chat", {"max_completion_tokens": 3, "max_tokens": None}, apis=CHAT),
    Row("no most, and a priority", {"max_tokens": None, "priority": 5}),
    # On CPUs vLLM dies of a seed where it computes a prompt in several steps.
    Row("a seed", {"seed": 5, "temperature": 1.0}, tokens=40, blocks=2),
    Row("a salt", {"cache_salt": "of a client"}, apis=BOTH),
    Row("a grammar", {"structured_outputs": {"choice": ["w5", "w6"]}, "ignore_eos": False},
        apis=BOTH),
    Row("an id of its own", {"request_id": "mine", "n": 2, **SAMPLES}),
    Row("cut in front", {"truncate_prompt_tokens": 40}, blocks=2, apis=BOTH),
    Row("words that must not come", {"bad_words": ["w7"], "stop": ["w8"], "stop_token_ids": [9]}),
    *(Row(f"n of {n}", {"n": n, **SAMPLES}, apis=BOTH) for n in (1, 4)),
    Row("n of 3, a stream", {"n": 3, "stream": True, **SAMPLES}, apis=BOTH),
    Row("n of 2 and log-probabilities", {"n": 2, "logprobs": 2, **SAMPLES}),
    Row("more tokens than decode has, n of 2", {"n": 2, "max_tokens": DECODE_LEN, **SAMPLES},
        **NEARLY_ALL),
    Row("a stream beyond decode", {"max_tokens": 40, "stream": True}, **NEARLY_ALL),
    Row("a name that prefill does not know", {"model": NAMES["decode"]}, blocks=0, apis=BOTH),
    # vLLM computes these on decode, whatever it is told.
    *(
        Row(f"beams: {n}", {"n": n, "use_beam_search": True}, blocks=0, apis=BOTH)
        for n in (1, 3)
    ),
    Row("beams as a stream", {"n": 2, "use_beam_search": True, "stream": True}, blocks=0,
        apis=CHAT),
    Row("beams, said in a word", {"n": 2, "use_beam_search": "yes"}, blocks=0, apis=BOTH),
    Row("beams, said with a number", {"n": 2, "use_beam_search": 1}, blocks=0),
    Row("of the prompt", {"prompt_logprobs": 0}, blocks=0),
    Row("of the prompt and of n", {"prompt_logprobs": 1, "n": 2, **SAMPLES}, blocks=0, apis=BOTH),
    Row("of an echo alone", {"echo": True, "logprobs": 2, "max_tokens": 0}, blocks=0),
    Row("of an echo", {"echo": True, "logprobs": True, "top_logprobs": 2}, blocks=0, apis=CHAT),
]  # fmt: skip


@rows_of(ANSWERED)
def test_an_answer_is_one_servers(rooms: Rooms, api: str, row: Row) -> None:
    check_body(rooms, api, body_of(api, row.tokens, **row.more), row)


# --- refusals -------------------------------------------------------------------------------------


def refused(name: str, more: Json | None = None, status: int = 400, **rest: Any) -> Row:
    """A row of which prefill computes nothing."""
    return Row(name, more or {}, status, **{"blocks": 0, **rest})


REFUSED = [
    refused("options of a stream without one", {"stream_options": {"include_usage": True}},
        apis=BOTH),
    refused("too many log-probabilities", {"logprobs": 1000}),
    refused("fewer than none", {"logprobs": True, "top_logprobs": -5}, apis=CHAT),
    refused("chosen tokens alone", {"logprob_token_ids": [5]}, apis=BOTH),
    refused("prompt_logprobs of a stream", {"prompt_logprobs": 1, "stream": True}, apis=BOTH),
    refused("beams as a stream", {"use_beam_search": True, "stream": True}),
    refused("beams and an echo", {"use_beam_search": True, "echo": True, "logprobs": 1}),
    refused("a chat beyond decode", {"max_tokens": 40}, tokens=DECODE_LEN - 10, apis=CHAT),
    refused("no token", {"max_tokens": 0}),
    refused("a prompt that is longer than decode's", tokens=DECODE_LEN + 88, apis=BOTH),
    refused("n of 0", {"n": 0}, apis=BOTH),
    refused("n of 2, greedily", {"n": 2}, blocks=BLOCKS, apis=BOTH),
    refused("n of 2 of a prompt that is too long", {"n": 2, **SAMPLES}, tokens=DECODE_LEN + 88,
        apis=BOTH),
    refused("no token in a prompt", {"prompt": [[]]}),
    refused("null for a prompt", {"prompt": None}),
    refused("a token that is not one", {"prompt": [5, 99_999]}),
    refused("words and tokens", {"prompt": ["w5", [6]]}, blocks=None),
    refused("a message that is none", {"messages": ["w5"]}, apis=CHAT),
    refused("null for messages", {"messages": None}, apis=CHAT),
    refused("a choice without tools", {"tool_choice": "required"}, apis=CHAT),
    refused("a grammar that is none", {"structured_outputs": {"regex": "(("}}, apis=BOTH),
    refused("an empty salt", {"cache_salt": ""}),
    refused("parameters by another way", {"vllm_xargs": {"kv_transfer_params": {"room": 5}}}),
    refused("a name that decode does not know", {"model": NAMES["prefill"], "n": 2, **SAMPLES},
        status=404, apis=BOTH),
]  # fmt: skip


@rows_of(REFUSED)
def test_a_refusal_is_one_servers(rooms: Rooms, api: str, row: Row) -> None:
    check_body(rooms, api, body_of(api, row.tokens, **row.more), row)


def test_more_samples_than_a_client_may_have_are_refused_for_good(rooms: Rooms) -> None:
    body = body_of("completions", TOKENS, n=100_000, **SAMPLES)
    said = rooms.ask(PATHS["completions"], body).read()
    assert said.status == 400
    assert said.value["error"]["param"] == "n"
    check_after(rooms)


# --- several prompts ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_several_prompts_are_brought_each(
    rooms: Rooms, n: int, as_text: bool, stream: bool
) -> None:
    prompts: list[Any] = [new_prompt(40), new_prompt(70), new_prompt(10)]
    prompts = [text_of(prompt) for prompt in prompts] if as_text else prompts
    body = body_of("completions", prompt=prompts, n=n, stream=stream, **SAMPLES)
    check_body(rooms, "completions", body, Row("several", blocks=2 + 3 + 1))


def test_one_of_several_prompts_is_refused(rooms: Rooms) -> None:
    prompts = [new_prompt(40), new_prompt(DECODE_LEN + 88), new_prompt(70)]
    body = body_of("completions", prompt=prompts)
    check_body(rooms, "completions", body, Row("several", status=400, blocks=None))


# --- what comes between ---------------------------------------------------------------------------

LONG = {"max_tokens": 400, "stream": True}
APIS = pytest.mark.parametrize("api", ["completions", "chat"])


@APIS
@pytest.mark.parametrize("more", [{"stream": True}, {"n": 3, **SAMPLES}])
@pytest.mark.parametrize(
    ("stopped", "waits", "gauge"),
    [("prefill", "decode", "loads_waiting"), ("decode", "prefill", "sends_unpromised")],
)
def test_the_client_leaves_while_one_server_waits_for_the_other(
    rooms: Rooms, stopped: str, waits: str, gauge: str, api: str, more: Json
) -> None:
    """The request that the other server has not read yet comes when nobody wants it any more."""
    server: Server = getattr(rooms, stopped)
    server.signal(signal.SIGSTOP)
    try:
        client = rooms.ask(PATHS[api], body_of(api, **more))
        rooms.until_gauge(waits, gauge)
        if waits == "prefill":
            assert rooms.prefill.metrics()["vllm:kv_cache_usage_perc"] == 0, "nothing is computed"
        client.leave()
        rooms.until_gauge(waits, gauge, 0)
    finally:
        server.signal(signal.SIGCONT)
    check_after(rooms)


@APIS
@pytest.mark.parametrize("more", [{}, {"n": 3, **SAMPLES}])
def test_the_client_leaves_in_the_middle_of_a_stream(rooms: Rooms, api: str, more: Json) -> None:
    for _ in range(10):  # a small model may have said everything before it is looked at
        client = rooms.ask(PATHS[api], body_of(api, **LONG | more))
        assert client.first_event()
        in_the_middle = rooms.decode.metrics()["vllm:num_requests_running"] > 0
        client.leave()
        check_after(rooms)
        if in_the_middle:
            return
    raise AssertionError("no client has left in the middle of a stream")


# --- routers that place what the proxy would not --------------------------------------------------


@pytest.mark.parametrize("more", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
def test_a_room_of_a_prompt_that_decode_computes(rooms: Rooms, more: Json) -> None:
    """vLLM starts such a prompt whatever a connector says of it."""
    body = body_of("completions", **more)
    send = {"do_remote_decode": True, "room": 5, "decode": "decode-0"}
    load = {"do_remote_prefill": True, "room": 5, "prefill": f"tcp://127.0.0.1:{rooms.kv_port}"}
    Client(rooms.prefill.port, PATHS["completions"], {**body, "kv_transfer_params": send}).read()
    rooms.settled()  # prefill waits for nothing, and decode was not asked yet
    both = Client(rooms.decode.port, PATHS["completions"], {**body, "kv_transfer_params": load})
    assert is_same(both.read().value, rooms.alone(PATHS["completions"], body).value)
    check_after(rooms)


# --- what decode computes itself ------------------------------------------------------------------


@dataclass
class Conversation:
    """Turns through the proxy. Each answer ends with a block, so that the next turn lacks the
    answer's last token, which has no KV, and what is said then."""

    rooms: Rooms
    tokens: list[int] = field(default_factory=list)

    def say(self, num_tokens: int, **more: Any) -> Json:
        """The request of the next turn."""
        self.tokens = [*self.tokens, *new_prompt(num_tokens)]
        most = -len(self.tokens) % BLOCK + 1
        return body_of("completions", prompt=self.tokens, max_tokens=most, **more)

    def hear(self, body: Json, client: Client) -> None:
        """The answer: it is one server's."""
        said = client.read()
        assert (said.status, said.error) == (200, "")
        assert is_same(said.value, self.rooms.alone(PATHS["completions"], body).value)
        (choice,) = said.value["choices"].values() if body.get("stream") else said.value["choices"]
        self.tokens = [*self.tokens, *choice["token_ids"]]

    def turn(self, num_tokens: int, **more: Any) -> None:
        body = self.say(num_tokens, **more)
        self.hear(body, self.rooms.ask(PATHS["completions"], body))
        self.rooms.settled()


def prefill_computed(rooms: Rooms) -> float:
    """Tokens of the prompts that prefill has computed."""
    return rooms.prefill.metrics()["vllm:prompt_tokens_total"]


def of_decode(rooms: Rooms) -> tuple[int, int]:
    """Requests whose missing tokens it has computed, and these tokens."""
    return rooms.decode.counter("computed_requests"), rooms.decode.counter("computed_tokens")


def test_a_conversation_whose_turns_lack_little_is_decodes_alone(rooms: Rooms) -> None:
    talk = Conversation(rooms)
    sent, (requests, tokens) = rooms.blocks_sent(), of_decode(rooms)
    talk.turn(200)
    rooms.has_sent(sent + 7)
    # The proxy ends prefill's request once decode has answered: vLLM may then not count its prompt.
    computed = prefill_computed(rooms)
    for turn in range(4):
        talk.turn(BELOW - 1, stream=turn % 2 == 1)
    # Decode says so with a step, which may be a later one.
    until(lambda: of_decode(rooms)[0] >= requests + 4)
    assert of_decode(rooms) == (requests + 4, tokens + 4 * BELOW)
    assert (prefill_computed(rooms), rooms.blocks_sent()) == (computed, sent + 7)
    talk.turn(BELOW)  # a token more
    rooms.has_sent(sent + 7 + 1)
    assert of_decode(rooms) == (requests + 4, tokens + 4 * BELOW)
