"""Calls of langchain-openai, `OpenAI` and `ChatOpenAI`. Prints what it has counted as JSON."""

import json
import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

AT: dict[str, Any] = {
    "base_url": sys.argv[1], "api_key": "none", "model": "small", "temperature": 0,
    "max_retries": 0,
}  # fmt: skip
TEXTS = ["Once upon", "a time", "there was"]
counts = [0, 0, 0]  # requests, tokens of prompts, of answers


def note(prompt: int, answer: int) -> None:
    counts[:] = counts[0] + 1, counts[1] + prompt, counts[2] + answer


def note_message(message: Any) -> Any:
    note(message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"])
    return message


@tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return city


def texts() -> None:
    made = OpenAI(**AT, max_tokens=8).generate(TEXTS)
    assert len(made.generations) == 3
    usage = (made.llm_output or {})["token_usage"]
    note(usage["prompt_tokens"], usage["completion_tokens"])
    # By default its completions ask for several answers at once in batches of twenty.
    made = OpenAI(**AT, max_tokens=4, batch_size=2, n=2).generate(TEXTS)
    assert [len(one) for one in made.generations] == [2, 2, 2]
    usage = (made.llm_output or {})["token_usage"]
    note(usage["prompt_tokens"], usage["completion_tokens"])
    counts[0] += 1  # two batches


def chats() -> None:
    model = ChatOpenAI(**AT, max_tokens=8)
    said = note_message(model.invoke("Once upon a time")).content
    parts = model.stream("Once upon a time", stream_usage=True)
    whole: Any = None
    for part in parts:
        whole = part if whole is None else whole + part
    assert note_message(whole).content == said
    for message in model.batch(["Once upon", "a time"]):
        note_message(message)
    call = {"name": "weather", "args": {"city": "Rom"}, "id": "c1", "type": "tool_call"}
    history = [
        HumanMessage("How is the weather?"), AIMessage("", tool_calls=[call]),
        ToolMessage("fine", tool_call_id="c1"),
    ]  # fmt: skip
    answer = note_message(model.bind_tools([weather]).invoke(history))
    assert answer.usage_metadata["input_tokens"] > 100  # the template shows tools
    assert answer.content


texts()
chats()
print(json.dumps(dict(zip(("requests", "prompt", "answer"), counts, strict=True))))
