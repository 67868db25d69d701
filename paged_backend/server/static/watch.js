// Keeps the right half up to date: asks for the map while somebody can see it.

import { ApiError, getJSON } from "./api.js";
import { addSample } from "./chart.js";
import { byId, count, make, percent, plural, setText } from "./elements.js";
import { colorOf, highlight, numBeyond, showMap, startMap } from "./kv_map.js";

const BUSY_MILLISECONDS = 250;
const IDLE_MILLISECONDS = 700;
const FAILED_MILLISECONDS = 2000;
const MOST_ROWS = 12;
const rows = new Map(); // by the request's number: the row and its cells
let chosen = null;

export async function startWatching(model) {
  startMap();
  for (;;) {
    await visible();
    const pause = await look(model());
    if (pause === null) return;
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

// Shows what there is now of the model that is chosen; returns how long to wait, or null if there is no key to look with.
async function look(model) {
  try {
    const map = await getJSON(model ? `paged/kv_map?model=${encodeURIComponent(model)}` : "paged/kv_map");
    show(map);
    const isBusy = map.stats.num_running + map.stats.num_waiting > 0;
    setState(isBusy ? "busy" : "ready");
    return isBusy ? BUSY_MILLISECONDS : IDLE_MILLISECONDS;
  } catch (error) {
    if (error.code === "no_key") {
      setState("waiting", "needs a key");
      return null;
    }
    if (error.code === "loading") setState("waiting", "the model is not loaded yet");
    else setState("failed", error instanceof ApiError ? error.message : "the server does not answer");
    return FAILED_MILLISECONDS;
  }
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

function setState(state, text = state) {
  const element = byId("state");
  element.dataset.state = state;
  setText(element, text);
}

function show(map) {
  const { stats } = map;
  showMap(map);
  const rate = addSample(map.model, map.time, stats.num_generated_tokens);
  const numHeld = stats.num_blocks - stats.num_free_blocks;
  const figures = {
    "num-running": count(stats.num_running),
    "num-waiting": count(stats.num_waiting),
    rate: count(Math.round(rate)),
    "num-held": count(numHeld),
    waste: percent(map.kv_waste),
    "hit-rate": percent(stats.num_prefix_hit_tokens / Math.max(1, stats.num_prefix_queried_tokens)),
    "num-preemptions": count(stats.num_preemptions),
    size: sizeText(map),
    beyond: numBeyond() > 0 ? `and ${plural(numBeyond(), "more block")}, never used so far` : "",
  };
  for (const [id, text] of Object.entries(figures)) setText(byId(id), text);
  showRequests(map.requests, stats.num_running + stats.num_waiting);
}

function sizeText({ stats, blocks_per_cell: perCell }) {
  if (!stats.num_blocks) return "this model has none";
  const cells = perCell > 1 ? `, ${perCell} to a square` : "";
  const groups = stats.num_layer_groups > 1 ? `, in each of ${stats.num_layer_groups} groups of layers` : "";
  return `${plural(stats.num_blocks, "block")} of ${plural(stats.block_size, "token")}${groups}${cells}`;
}

function showRequests(requests, numSequences) {
  const listed = requests.slice(0, MOST_ROWS);
  const numbers = new Set(listed.map((request) => request.number));
  for (const [number, { row }] of rows) {
    if (numbers.has(number)) continue;
    row.remove();
    rows.delete(number);
    if (chosen === number) choose(null);
  }
  for (const request of listed) fill(rows.get(request.number) ?? newRow(request.number), request);
  const numMore = requests.length - listed.length;
  const text = numMore > 0 ? `and ${numMore} more` : numSequences ? "" : "None at the moment.";
  setText(byId("more-requests"), text);
}

function newRow(number) {
  const swatch = make("span", { className: "swatch" });
  swatch.style.background = colorOf(number);
  const title = `Show the blocks of request ${number} alone`;
  const button = make("button", { type: "button", "aria-pressed": "false", title }, swatch, String(number));
  button.addEventListener("click", () => choose(chosen === number ? null : number));
  const cells = ["prompt", "cached", "output", "blocks", "state"].map(() => make("td"));
  const row = make("tr", {}, make("td", {}, button), ...cells);
  byId("requests").append(row);
  const entry = { row, cells, button };
  rows.set(number, entry);
  return entry;
}

function fill({ cells }, request) {
  const samples = request.num_sequences > 1 ? ` in ${request.num_sequences}` : "";
  const texts = [
    count(request.num_prompt_tokens),
    count(request.num_cached_tokens),
    count(request.num_output_tokens) + samples,
    count(request.num_blocks),
    request.is_running ? "running" : "waiting",
  ];
  texts.forEach((text, index) => setText(cells[index], text));
}

function choose(number) {
  chosen = number;
  for (const [other, { button }] of rows) button.setAttribute("aria-pressed", String(other === number));
  highlight(number);
}
