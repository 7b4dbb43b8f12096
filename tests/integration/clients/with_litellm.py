"""Calls of litellm, as `openai/small`. Prints what it has counted as JSON."""

import asyncio
import json
import sys
from typing import Any

import litellm

litellm.suppress_debug_info = True
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Once upon a time"}]
AT: dict[str, Any] = {
    "api_base": sys.argv[1], "api_key": "none", "max_tokens": 8, "temperature": 0,
    "num_retries": 0,
}  # fmt: skip
STREAM: dict[str, Any] = {**AT, "stream": True, "stream_options": {"include_usage": True}}
usages: list[Any] = []


def note(answer: Any) -> Any:
    usages.append(answer.usage)
    return answer


def text_of(answer: Any) -> str:
    return answer.choices[0].message.content or ""


async def together() -> None:
    answer = await litellm.acompletion("openai/small", messages=CHAT, **AT)
    assert text_of(note(answer)) == said
    stream = await litellm.acompletion("openai/small", messages=CHAT, **STREAM)
    chunks = [chunk async for chunk in stream]
    assert text_of(note(litellm.stream_chunk_builder(chunks, messages=CHAT))) == said


said = text_of(note(litellm.completion("openai/small", messages=CHAT, **AT)))
assert len(said.split()) == 8, said
chunks = list(litellm.completion("openai/small", messages=CHAT, **STREAM))
assert text_of(note(litellm.stream_chunk_builder(chunks, messages=CHAT))) == said
more = [*CHAT, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on"}]
note(litellm.completion("openai/small", messages=more, n=2, stop=["never"], user="u", **AT))
made = litellm.text_completion("Once upon a time", model="text-completion-openai/small", **AT)
assert note(made).choices[0].text
asyncio.run(together())
prompt = sum(usage.prompt_tokens for usage in usages)
answer = sum(usage.completion_tokens for usage in usages)
print(json.dumps({"requests": len(usages), "prompt": prompt, "answer": answer}))
