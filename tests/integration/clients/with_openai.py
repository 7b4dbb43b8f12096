"""Calls of OpenAI's own client. Prints what it has counted as JSON."""

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI, OpenAI

URL = sys.argv[1]
CHAT: list[Any] = [{"role": "user", "content": "Once upon a time"}]
TEXTS = ["Once upon", "a time", "there was"]
SHORT: dict[str, Any] = {"model": "small", "max_tokens": 8, "temperature": 0}
STREAM: dict[str, Any] = {**SHORT, "stream": True, "stream_options": {"include_usage": True}}
usages: list[Any] = []


def note(answer: Any) -> Any:
    usages.append(answer.usage)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return answer


def joined(chunks: list[Any], text: Any) -> str:
    """Note the usage of a stream, and return its text."""
    *begun, last = chunks
    assert not last.choices
    note(last)
    return "".join(text(choice) or "" for one in begun for choice in one.choices)


def blocking() -> None:
    client = OpenAI(base_url=URL, api_key="none", max_retries=0)
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == "small"
    chats, completions = client.chat.completions, client.completions
    said = note(chats.create(messages=CHAT, **SHORT)).choices[0].message.content
    stream = list(chats.create(messages=CHAT, **STREAM))
    assert joined(stream, lambda choice: choice.delta.content) == said
    several = note(chats.create(messages=CHAT, n=3, **SHORT))
    assert [choice.message.content for choice in several.choices] == [said] * 3
    second = said.split()[1]
    stopped = note(chats.create(messages=CHAT, stop=[second], **SHORT)).choices[0]
    assert stopped.finish_reason == "stop"
    assert second not in stopped.message.content
    made = note(completions.create(prompt=TEXTS, n=2, **SHORT))
    assert [choice.index for choice in made.choices] == [*range(6)]
    stream = list(completions.create(prompt=TEXTS[0], **STREAM))
    assert joined(stream, lambda choice: choice.text) == made.choices[0].text
    tokens = note(completions.create(prompt=[*range(40)], seed=1, **SHORT))
    assert tokens.usage.prompt_tokens == 40
    assert tokens.usage.completion_tokens <= 8
    with client.chat.completions.stream(
        model="small", messages=CHAT, max_tokens=8, temperature=0, stop=[second],
        stream_options={"include_usage": True},
    ) as events:  # fmt: skip
        parsed = note(events.get_final_completion()).choices[0]
    assert parsed.message.content == stopped.message.content


async def together() -> None:
    async with AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(
            *(client.chat.completions.create(messages=CHAT, **SHORT) for _ in range(4)),
            *(client.completions.create(prompt=text, **SHORT) for text in TEXTS),
        )
        for answer in answers:
            note(answer)
        stream = await client.chat.completions.create(messages=CHAT, **STREAM)
        chunks = [chunk async for chunk in stream]
        said = joined(chunks, lambda choice: choice.delta.content)
        assert said == answers[0].choices[0].message.content


blocking()
asyncio.run(together())
prompt = sum(usage.prompt_tokens for usage in usages)
answer = sum(usage.completion_tokens for usage in usages)
print(json.dumps({"requests": len(usages), "prompt": prompt, "answer": answer}))
