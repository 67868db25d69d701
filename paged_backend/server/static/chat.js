// A conversation that streams, can be stopped, and says what it cost.

import { stream } from "./api.js";
import { byId, count, make, plural, setText } from "./elements.js";
import { readOptions, systemPrompt } from "./options.js";

const log = byId("log");
const prompt = byId("prompt");
let history = [];
let running = null; // the AbortController of the answer that streams

export function startChat(model) {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(model());
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("new-chat").addEventListener("click", () => {
    running?.abort();
    history = [];
    log.replaceChildren(welcome);
    prompt.focus();
  });
}

const welcome = byId("welcome");

function ask(model) {
  const text = prompt.value.trim();
  if (!text || running) return;
  const options = readOptions();
  if (options === null) return;
  welcome.remove();
  prompt.value = "";
  history.push({ role: "user", content: text });
  append(make("article", { className: "turn user", "aria-label": "You" }, make("div", { className: "text", text })));
  answer(model, options);
}

async function answer(model, options) {
  const view = new AnswerView();
  const messages = systemPrompt() ? [{ role: "system", content: systemPrompt() }, ...history] : history;
  const body = { model, messages, ...options, stream: true, stream_options: { include_usage: true } };
  const past = history; // a new chat begins a new list
  running = new AbortController();
  setBusy(true);
  let outcome = "Answered";
  try {
    for await (const event of stream("v1/chat/completions", body, running.signal)) view.add(event);
  } catch (error) {
    const stopped = error.name === "AbortError";
    outcome = stopped ? "Stopped" : "Failed";
    if (!stopped) view.fail(error);
  }
  running = null;
  setBusy(false);
  view.end(outcome);
  if (view.message) past.push(view.message);
  else takeBack(past);
  if (view.calls.length) offerResults(view, past, () => answer(model, options));
}

// A message without an answer is no part of the conversation: it may be changed and sent again.
function takeBack(past) {
  if (past.at(-1)?.role !== "user") return;
  const { content } = past.pop();
  if (!prompt.value && past === history) prompt.value = content;
}

function setBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  log.setAttribute("aria-busy", String(isBusy));
  if (isBusy) setText(byId("announcer"), "Answering");
}

function append(element) {
  log.append(element);
  log.scrollTop = log.scrollHeight;
}

// One answer, or several side by side, as they grow.
class AnswerView {
  constructor() {
    this.choices = new Map();
    this.usage = null;
    this.finish = null;
    this.start = performance.now();
    this.first = this.last = null;
    this.numPieces = 0;
    this.answers = make("div", { className: "answers" });
    this.foot = make("p", { className: "hint" });
    this.turn = make("article", { className: "turn", "aria-label": "Answer" }, this.answers, this.foot);
    append(this.turn);
    this.choice(0);
  }

  choice(index) {
    if (!this.choices.has(index)) {
      const text = make("div", { className: "text" });
      const element = make("div", { className: "answer streaming" }, text);
      this.choices.set(index, { element, text, content: "", reasoning: null, calls: [] });
      this.answers.append(element);
    }
    return this.choices.get(index);
  }

  add(event) {
    if (event.usage) this.usage = event.usage;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    for (const { index, delta, finish_reason: reason } of event.choices) {
      if (reason) this.finish = reason;
      if (delta.content || delta.reasoning || delta.tool_calls) this.timed();
      this.grow(this.choice(index), delta);
    }
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  timed() {
    this.last = performance.now();
    this.first ??= this.last;
    this.numPieces += 1;
  }

  grow(choice, delta) {
    if (delta.content) {
      choice.content += delta.content;
      choice.text.append(delta.content);
    }
    if (delta.reasoning) {
      choice.reasoning ??= reasoningIn(choice.element);
      choice.reasoning.append(delta.reasoning);
    }
    for (const piece of delta.tool_calls ?? []) {
      const call = (choice.calls[piece.index] ??= newCall(choice.element, piece));
      call.arguments += piece.function.arguments ?? "";
      setText(call.view, call.arguments);
    }
  }

  fail(error) {
    this.turn.append(make("p", { className: "error", role: "alert", text: error.message }));
  }

  get calls() {
    return (this.choices.get(0)?.calls ?? []).filter(Boolean);
  }

  // What the conversation goes on with: the first answer, or null if there is none.
  get message() {
    const { content } = this.choices.get(0);
    if (!content && !this.calls.length) return null;
    const message = { role: "assistant", content };
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, name, arguments: given }) => ({
        id, type: "function", function: { name, arguments: given },
      }));
    }
    return message;
  }

  end(outcome) {
    for (const { element } of this.choices.values()) element.classList.remove("streaming");
    setText(this.foot, this.costs(outcome).join(" · "));
    setText(byId("announcer"), `${outcome}. ${this.foot.textContent}`);
    log.scrollTop = log.scrollHeight;
  }

  costs(outcome) {
    const parts = outcome === "Stopped" ? ["stopped"] : [];
    const { usage, first, last, start } = this;
    const numTokens = usage?.completion_tokens ?? this.numPieces;
    if (first === null) return parts;
    parts.push(plural(numTokens, "token"));
    if (last > first) parts.push(`${((numTokens - 1) / ((last - first) / 1000)).toFixed(1)} tokens/s`);
    parts.push(`first after ${((first - start) / 1000).toFixed(2)} s`);
    if (usage) {
      const numCached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`prompt of ${count(usage.prompt_tokens)}, ${count(numCached)} cached`);
    }
    if (this.finish === "length") parts.push("cut at the limit");
    return parts;
  }
}

function reasoningIn(element) {
  const text = make("div", { className: "text" });
  element.prepend(
    make("details", { className: "reasoning", open: "" }, make("summary", { text: "Reasoning" }), text),
  );
  return text;
}

function newCall(element, { id, function: called }) {
  const view = make("pre", { className: "code" });
  const box = make("div", { className: "call" }, make("strong", { text: `Calls ${called.name}` }), view);
  element.append(box);
  return { id, name: called.name, arguments: "", view, box };
}

// Lets people play the tools: what they give goes back as the calls' results.
function offerResults(view, past, goOn) {
  const inputs = view.calls.map((call) => {
    const input = make("input", { type: "text" });
    call.box.append(make("label", { className: "hint", text: `Result of ${call.name}` }, input));
    return input;
  });
  const button = make("button", { type: "button", className: "second", text: "Give results" });
  view.turn.append(button);
  button.addEventListener("click", () => {
    if (running || past !== history) return;
    button.remove();
    view.calls.forEach((call, index) => {
      inputs[index].disabled = true;
      past.push({ role: "tool", tool_call_id: call.id, content: inputs[index].value });
    });
    goOn();
  });
  log.scrollTop = log.scrollHeight;
}
