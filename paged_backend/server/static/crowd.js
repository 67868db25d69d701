// Many requests at once, so that there is something to see. They share a system prompt, as a service's would.

import { stream } from "./api.js";
import { byId, setText } from "./elements.js";

const SYSTEM =
  "You are the friendly voice of a small library in a town by a river. You answer visitors in a few plain sentences. " +
  "You never invent titles, and when you do not know something you say so and point them to the desk on the ground " +
  "floor. The library is open from nine to seven, on Saturdays from ten to four, and closed on Sundays. Children's " +
  "books are on the first floor beside the reading room, maps and newspapers in the cellar, and everything else is " +
  "sorted by subject, then by author. Members borrow up to twelve books for four weeks, and may keep them for four " +
  "more unless somebody else waits for them. You mention one thing to read, why it is worth it, and where it stands.";
const TOPICS = [
  "the tides", "bicycles", "bread", "glaciers", "chess", "the moon", "whales", "maps", "gardens", "volcanoes", "jazz",
  "paper", "bridges", "honey", "clocks", "rivers",
];
const NUMS_TOKENS = [50, 100, 200]; // a request for each: browsers keep six connections to a server, no more
let running = null;

export function startCrowd(model) {
  byId("crowd").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else sendCrowd(model(), Number(byId("crowd-size").value));
  });
}

async function sendCrowd(model, size) {
  running = new AbortController();
  const { signal } = running;
  name("Stop");
  let numDone = 0;
  const report = () => setText(byId("crowd-state"), `${numDone} of ${size} answered`);
  report();
  const results = await Promise.allSettled(
    requests(model, size).map(async (body) => {
      for await (const { choices } of stream("v1/completions", body, signal)) {
        numDone += choices.filter((choice) => choice.finish_reason).length;
        report();
      }
    }),
  );
  const failed = results.find(({ reason }) => reason && reason.name !== "AbortError");
  if (failed) setText(byId("crowd-state"), `${numDone} of ${size} answered; then: ${failed.reason.message}`);
  else if (numDone < size) setText(byId("crowd-state"), `Stopped after ${numDone} of ${size}`);
  name("Send");
  running = null;
}

function requests(model, size) {
  const groups = NUMS_TOKENS.map(() => []);
  for (let index = 0; index < size; index += 1) {
    const topic = TOPICS[index % TOPICS.length];
    groups[index % groups.length].push(`${SYSTEM}\n\nVisitor: What should I read about ${topic}?\nLibrary:`);
  }
  return groups
    .map((prompt, index) => ({ model, prompt, max_tokens: NUMS_TOKENS[index], temperature: 1, stream: true }))
    .filter(({ prompt }) => prompt.length);
}

function name(verb) {
  setText(byId("crowd-button"), verb);
  byId("crowd-button").ariaLabel = `${verb} the crowd`; // there is another button of this name
}
