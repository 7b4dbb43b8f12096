"""The chat page in Chromium, over `prefixkv serve`."""

import os
import signal
import urllib.request
from collections.abc import Iterator

import pytest

pytest.importorskip("selenium", reason="no selenium: the chat page was NOT tested")

from selenium.webdriver.common.keys import Keys

from tests.support.browser import Browser
from tests.support.patience import PATIENCE_S, until
from tests.support.served import Expected, Serve, at_rest

HELLO = "Hello there, tell me something about cats and boats."
STORY, ENDLESS = "Once upon a time", "3000"  # its greedy answer does not end before


def user(said: str) -> dict[str, str]:
    return {"role": "user", "content": said}


def page_of(serve: Serve) -> str:
    return serve.url.removesuffix("v1")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def page(chromium: Browser, serve: Serve) -> Iterator[Browser]:
    """The page, new, asked for greedy answers of 24 tokens."""
    begin(chromium, serve)
    yield chromium
    assert chromium.complaints() == []


def begin(browser: Browser, serve: Serve) -> None:
    browser.open(page_of(serve))
    browser.fill("#temperature", "0")
    browser.fill("#most", "24")


def ended(page: Browser, num: int) -> None:
    """So many turns are there, and none is being answered."""
    until(lambda: len(page.all(".turn")) == num and not page.all(".turn.running"))


def split(page: Browser) -> dict[str, int]:
    """The last bar's numbers."""
    box = page.all(".usage")[-1]
    entries = box.find_elements("css selector", ".keys li")
    return {one.get_attribute("data-kind"): int(one.text.split()[0]) for one in entries}


def test_two_turns_are_answered_and_the_second_shows_its_hits(
    page: Browser, expected: Expected
) -> None:
    until(lambda: page.texts("#model") == ["small"])
    assert not page.one("#key").is_displayed(), "none is wanted"
    page.ask(HELLO)
    ended(page, 1)
    first = expected.chat([user(HELLO)], 24)
    assert page.texts(".answer") == [first.strip()]
    prompt = len(expected.texts.chat([user(HELLO)]))
    numbers = split(page)
    assert numbers["decode-hit"] + numbers["sent"] == prompt
    page.ask("And?")
    ended(page, 2)
    chat = [user(HELLO), {"role": "assistant", "content": first}, user("And?")]
    assert page.texts(".answer")[1] == expected.chat(chat, 24).strip()
    num = len(expected.texts.chat(chat))
    hit = (prompt + 23) // 16 * 16
    numbers = split(page)
    assert numbers["decode-hit"] == hit
    assert numbers["sent"] == num - hit
    assert numbers["prefill-hit"] >= prompt // 16 * 16
    assert numbers["prefill-hit"] + numbers["computed"] == num
    label = page.one(".bars").get_attribute("aria-label")
    assert label.startswith(f"Of {num} prompt tokens: {hit} hit on decode, {num - hit} sent")
    for bar, side in ((0, ("decode-hit", "sent")), (1, ("prefill-hit", "computed"))):
        parts = page.all(".usage")[-1].find_elements("css selector", ".bar")[bar]
        whole = parts.rect["width"]
        for part, name in zip(parts.find_elements("css selector", "i"), side, strict=True):
            assert part.rect["width"] == pytest.approx(whole * numbers[name] / num, abs=3)


def test_the_temperature_begins_as_the_server_has_it_and_then_is_the_readers(
    chromium: Browser, serve: Serve, expected: Expected
) -> None:
    chromium.open(page_of(serve))
    until(lambda: chromium.one("#temperature").get_attribute("value") == "0")
    assert chromium.one("#most").get_attribute("value") == "128", "the small model's"
    chromium.fill("#most", "12")
    chromium.ask(HELLO)
    ended(chromium, 1)
    assert chromium.texts(".answer") == [expected.chat([user(HELLO)], 12).strip()]
    chromium.fill("#temperature", "")
    chromium.ask("And?")
    ended(chromium, 2)
    assert chromium.one("#temperature").get_attribute("value") == ""
    assert not chromium.all(".error")


def grows(page: Browser) -> str:
    """Ask until an answer is seen to grow while it runs, and return what was seen of it first. On a
    loaded machine all 3,000 tokens may have come before the second look."""
    for _ in range(5):
        # A new chat each time: behind a stopped answer the next one may end soon, by how much of it
        # there was.
        page.one("#new").click()
        page.ask(STORY)
        until(lambda: any(page.texts(".answer")), state=lambda: str(page.texts(".turn")))
        seen = page.one(".answer").text
        until(
            lambda seen=seen: len(page.one(".answer").text) > len(seen) or not page.all(".running")
        )
        if page.all(".running"):
            return seen
    raise AssertionError(f"no answer grew: {page.texts('.turn')}")


def test_an_answer_grows_as_it_comes_and_stop_ends_it_on_the_workers(
    page: Browser, serve: Serve
) -> None:
    name = 'prefixkv_front_requests_total{outcome="aborted"}'
    before = serve.figures().get(name, 0)
    page.fill("#most", ENDLESS)
    for number, stop in enumerate((lambda: page.press(Keys.ESCAPE), page.one("#stop").click), 1):
        seen = grows(page)
        assert page.one("#stop").is_displayed()
        # Where the prompt's KV came from is there at the first token, and once the answer is over.
        running = split(page)
        assert running["decode-hit"] + running["sent"] > 0
        assert "all after" not in page.one(".times").text
        stop()
        ended(page, 1)
        assert split(page) == running
        assert "all after" in page.one(".times").text
        assert page.texts(".turn .note") == ["Stopped."]
        assert page.one(".answer").text.startswith(seen)
        until(lambda number=number: serve.figures().get(name, 0) == before + number)
        assert page.one("#send").is_displayed()
    at_rest(serve)
    # A new chat ends what runs, and forgets the rest.
    page.one("#new").click()
    page.ask(STORY)
    until(lambda: any(page.texts(".running .answer")))
    page.one("#new").click()
    until(lambda: serve.figures().get(name, 0) == before + 3)
    assert page.all(".turn") == []
    page.fill("#most", "3")
    page.ask("Hi")
    ended(page, 1)
    assert split(page).keys() == {"decode-hit", "sent", "prefill-hit", "computed"}


def test_an_error_is_shown_and_what_failed_is_tried_again_or_left_out(
    page: Browser, expected: Expected
) -> None:
    page.fill("#most", "999999")
    page.ask(HELLO)
    ended(page, 1)
    alert = page.one("[role=alert]")
    assert "999999 of an answer, the model takes 4096 together" in alert.text
    assert [one for one in page.complaints() if "400 (Bad Request)" not in one] == []
    page.fill("#most", "24")
    page.ask("Hi")
    ended(page, 2)
    assert page.one(".answer").text == expected.chat([user("Hi")], 24).strip()
    page.one("[role=alert] button").click()
    until(lambda: not page.all("[role=alert]") and not page.all(".turn.running"))
    assert page.texts(".answer")[0] == expected.chat([user(HELLO)], 24).strip()


def test_what_is_said_is_text_and_nothing_else_is_run_or_loaded(
    page: Browser, serve: Serve
) -> None:
    nasty = "<img src=x onerror='document.title=1'><script>document.title=2</script>"
    page.ask(nasty)
    ended(page, 1)
    assert page.texts(".question") == [nasty]
    assert page.run("return document.title") == "prefixkv"
    origin = page_of(serve)
    loaded = page.run("return performance.getEntriesByType('resource').map(one => one.name)")
    assert [one for one in loaded if not one.startswith((origin, "data:"))] == []
    assert page.complaints() == []


def test_it_is_used_by_keyboard_alone_and_at_a_phones_width(page: Browser) -> None:
    page.resize(360, 640)
    assert page.run("return document.documentElement.scrollWidth") <= 360
    page.run("document.getElementById('text').focus()")
    page.press("one", Keys.SHIFT, Keys.ENTER, Keys.SHIFT, "two")
    assert page.all(".turn") == []
    page.press(Keys.TAB, Keys.ENTER)  # to Send
    ended(page, 1)
    assert page.texts(".question") == ["one\ntwo"]
    page.ask("wide" * 200)
    ended(page, 2)
    assert page.run("return document.documentElement.scrollWidth") <= 360
    for selector in (".bar", "#text", "#send", "#new"):
        box = page.one(selector).rect
        assert box["width"] > 30
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    options = [page.one(selector).rect["y"] for selector in ("#temperature", "#most")]
    assert options[0] == options[1], "both fit in one line"
    main = page.run("const m = document.getElementById('main');"
                    "return m.scrollHeight - m.scrollTop - m.clientHeight")  # fmt: skip
    assert main < 2, "it shows the end"


def test_a_key_is_asked_for_where_it_is_wanted_and_a_lost_worker_is_shown(
    chromium: Browser, expected: Expected
) -> None:
    with Serve("--api-key", "secret") as serve:
        with urllib.request.urlopen(page_of(serve), timeout=PATIENCE_S) as answer:
            assert b"secret" not in answer.read()
        begin(chromium, serve)
        until(lambda: chromium.one("#key").is_displayed())
        for key in ("wrong", "secret"):
            chromium.fill("#key", key)
            chromium.press(Keys.ENTER)
            until(lambda key=key: ("wrong" in chromium.one("#model").text) == (key == "wrong"))
        until(lambda: chromium.texts("#model") == ["small"])
        assert not chromium.one("#key").is_displayed()
        chromium.fill("#most", ENDLESS)
        chromium.ask(STORY)
        until(lambda: any(chromium.texts(".running .answer")))
        pid = serve.workers()["decode-0"]["pid"]
        os.kill(pid, signal.SIGKILL)
        ended(chromium, 1)
        assert "decode-0 was lost" in chromium.one("[role=alert]").text
        until(lambda: serve.workers().get("decode-0", {"pid": pid})["pid"] != pid)
        chromium.fill("#most", "24")
        chromium.one("[role=alert] button").click()
        until(lambda: not chromium.all("[role=alert]") and not chromium.all(".turn.running"))
        assert chromium.texts(".answer") == [expected.chat([user(STORY)], 24).strip()]
    chromium.ask("Is anyone there?")
    ended(chromium, 2)
    assert "The server does not answer." in chromium.one("[role=alert]").text
