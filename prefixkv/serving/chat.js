"use strict";
const $ = (id) => document.getElementById(id);
const main = $("main"), turns = $("turns"), text = $("text");
let model = "", key = "";
let chosen = false;   // the temperature is the reader's, no more the server's
let chat = [];        // turns: {question, answer, show}
let running = null;   // {turn, abort}

// --- the server ------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

function headers(more) {
  return key ? {...more, authorization: `Bearer ${key}`} : more;
}

async function refusal(answer) {
  let message = `The server answered ${answer.status}.`;
  try { message = (await answer.json()).error.message; } catch { /* no body of OpenAI's form */ }
  return new Refused(answer.status, message);
}

async function findModel() {
  const answer = await fetch("v1/models", {headers: headers({})});
  if (!answer.ok) throw await refusal(answer);
  const served = (await answer.json()).data[0];
  model = served.id;
  if (!chosen) $("temperature").value = served.default_temperature ?? 1;
  if (model === "small" && !$("most").value) $("most").value = 128;  // words of no language
  $("model").textContent = model;
  $("key-row").hidden = true;
}

// The bodies of a stream's events, as they come.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part === "data: [DONE]") { yield null; return; }
        if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
      }
    }
  } finally { reader.cancel().catch(() => {}); }
}

async function* answerTo(messages, signal) {
  if (!model) await findModel();
  const asked = {
    model, messages, stream: true,
    stream_options: {include_usage: true, continuous_usage_stats: true},
  };
  if ($("temperature").value) asked.temperature = Number($("temperature").value);
  if ($("most").value) asked.max_completion_tokens = Number($("most").value);
  const answer = await fetch("v1/chat/completions", {
    method: "POST", signal, body: JSON.stringify(asked),
    headers: headers({"content-type": "application/json"}),
  });
  if (!answer.ok) throw await refusal(answer);
  let whole = false;
  for await (const event of events(answer.body)) {
    if (event === null) { whole = true; break; }
    if (event.error) throw new Refused(200, event.error.message);
    yield event;
  }
  if (!whole) throw new Error("The connection ended before the answer did.");
}

// --- a turn ----------------------------------------------------------------------------------

// What is said so far, without turns that brought nothing.
function messagesBefore(turn) {
  const messages = [];
  for (const one of chat.slice(0, chat.indexOf(turn))) {
    if (!one.answer) continue;
    messages.push({role: "user", content: one.question}, {role: "assistant", content: one.answer});
  }
  return [...messages, {role: "user", content: turn.question}];
}

async function ask(turn) {
  const abort = new AbortController(), begun = performance.now();
  const mine = running = {turn, abort};
  turn.answer = "";
  let first = null, finish = null, usage = null, shown = false;
  turn.show.begin();
  showRunning();
  try {
    for await (const event of answerTo(messagesBefore(turn), abort.signal)) {
      for (const choice of event.choices) {
        if (choice.delta.content) {
          first ??= performance.now() - begun;
          turn.answer += choice.delta.content;
          turn.show.answer(turn.answer);
        }
        finish = choice.finish_reason ?? finish;
      }
      usage = event.usage ?? usage;
      // Where the prompt's KV came from is known at the first token.
      if (usage && first !== null && !shown) { shown = true; turn.show.usage(usage, first, null); }
    }
    if (usage) turn.show.usage(usage, first, performance.now() - begun);
    if (finish === "length") turn.show.note("Cut off at the token limit.");
  } catch (error) {
    if (abort.signal.aborted) {
      turn.show.note("Stopped.");
      if (first !== null && usage) turn.show.usage(usage, first, performance.now() - begun);
    } else {
      const message = error instanceof Refused ? error.message
        : error instanceof TypeError ? "The server does not answer." : error.message;
      if (error.status === 401) showKey();
      turn.show.error(message);
    }
  } finally {
    turn.show.end();
    if (running === mine) { running = null; showRunning(); }
  }
}

function showRunning() {
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
}

function stop() {
  running?.abort.abort();
}

function send() {
  const question = text.value.trim();
  if (!question || running) return;
  text.value = "";
  fit();
  const turn = {question};
  turn.show = new TurnView(turn);
  chat.push(turn);
  turns.append(turn.show.item);
  $("empty").hidden = true;
  main.scrollTop = main.scrollHeight;
  ask(turn);
}

function newChat() {
  stop();
  running = null;
  showRunning();
  chat = [];
  turns.replaceChildren();
  $("empty").hidden = false;
  text.focus();
}

// --- what is shown ---------------------------------------------------------------------------

function make(tag, name, content) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (content !== undefined) element.textContent = content;
  return element;
}

class TurnView {
  constructor(turn) {
    this.turn = turn;
    this.item = make("li", "turn");
    this.said = make("p", "said answer");
    this.below = make("div");
    this.item.append(make("p", "said question", turn.question), this.said, this.below);
  }
  begin() {
    this.item.classList.add("running");
    this.item.setAttribute("aria-busy", "true");
    this.said.textContent = "";
    this.below.replaceChildren();
  }
  end() {
    this.item.classList.remove("running");
    this.item.setAttribute("aria-busy", "false");
  }
  answer(said) { this.keepEnd(() => { this.said.textContent = said.trimStart(); }); }
  note(said) { this.keepEnd(() => this.below.prepend(make("p", "note", said))); }
  error(message) {
    const box = make("div", "error"), again = make("button", "", "Try again");
    box.setAttribute("role", "alert");
    again.type = "button";
    again.addEventListener("click", () => {
      if (running) return;
      text.focus();
      ask(this.turn);
    });
    box.append(make("span", "", message), again);
    this.keepEnd(() => this.below.append(box));
  }
  // Of the prompt: what decode had, what it computed and what was sent there; what prefill had and
  // what it computed. `all`: ms to the answer's end, null while it goes on.
  usage(usage, first, all) {
    const split = usage.prefixkv, num = usage.prompt_tokens, host = split.decode_host_tokens;
    const box = make("div", "usage"), bars = make("div", "bars"), legend = [];
    const kinds = [
      ["Decode", [["decode-hit", split.decode_hit_tokens - host, "hit on decode"],
                  ...(host ? [["host", host, "loaded from its host memory"]] : []),
                  ...(split.shared_tokens ? [["shared", split.shared_tokens, "on the way there"]] : []),
                  ...(split.decode_computed_tokens
                    ? [["computed", split.decode_computed_tokens, "computed by decode"]] : []),
                  ["sent", split.sent_tokens, "sent to decode, which did not have them"]]],
      ["Prefill", [["prefill-hit", split.prefill_hit_tokens, "hit on prefill"],
                   ["computed", split.computed_tokens, "computed by prefill"]]],
    ];
    const words = [];
    for (const [side, parts] of kinds) {
      // A line of the legend for each bar.
      const bar = make("div", "bar"), keys = make("ul", "keys");
      for (const [name, tokens, what] of parts) {
        const part = make("i", name), entry = make("li"), number = make("b", "", tokens);
        part.style.flexGrow = tokens;
        part.hidden = !tokens;
        part.title = `${tokens} of ${num} prompt tokens ${what}`;
        bar.append(part);
        entry.dataset.kind = name;
        entry.append(make("i", name), number, ` ${what}`);
        keys.append(entry);
        words.push(`${tokens} ${what}`);
      }
      bars.append(make("span", "", side), bar);
      legend.push(keys);
    }
    bars.setAttribute("role", "img");
    bars.setAttribute("aria-label", `Of ${num} prompt tokens: ${words.join(", ")}`);
    const times = [`${num} prompt tokens`];
    if (all !== null) times.push(`${usage.completion_tokens} of the answer`);
    if (first !== null) times.push(`first after ${Math.round(first)} ms`);
    if (all !== null) times.push(`all after ${(all / 1000).toFixed(2)} s`);
    box.append(bars, ...legend, make("p", "times", times.join(" · ")));
    this.keepEnd(() => { this.below.querySelector(".usage")?.remove(); this.below.append(box); });
  }
  // A reader who is at the end stays there.
  keepEnd(change) {
    const atEnd = main.scrollHeight - main.scrollTop - main.clientHeight < 40;
    change();
    if (atEnd) main.scrollTop = main.scrollHeight;
  }
}

function showKey() {
  $("key-row").hidden = false;
  $("key").focus();
}

function fit() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

async function connect() {
  try {
    await findModel();
    return true;
  } catch (error) {
    if (error.status === 401) {
      $("model").textContent = key ? "the API key is wrong" : "an API key is needed";
      showKey();
    } else {
      $("model").textContent = error instanceof Refused ? error.message : "the server does not answer";
    }
    return false;
  }
}

// --- events ----------------------------------------------------------------------------------

$("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("key-row").addEventListener("submit", async (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  if (await connect()) text.focus();
});
text.addEventListener("input", fit);
$("temperature").addEventListener("input", () => { chosen = true; });
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) { event.preventDefault(); stop(); }
});
$("stop").addEventListener("click", () => { stop(); text.focus(); });
$("new").addEventListener("click", newChat);
connect();
