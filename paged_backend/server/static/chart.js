// Tokens per second over the last minutes, from the engine's own counter and clock.

import { byId, setText } from "./elements.js";

const SECONDS = 180;
const SMOOTH_SECONDS = 1.5;
const [WIDTH, HEIGHT] = [600, 90];
const samples = []; // { time, tokens, rate }, oldest first
let shown = null; // the model
const chart = byId("chart");

// Adds what a model's counter says at a time; returns the rate.
export function addSample(model, time, tokens) {
  if (model !== shown || tokens < samples.at(-1)?.tokens || time < samples.at(-1)?.time) samples.length = 0; // another engine
  shown = model;
  const last = samples.at(-1);
  if (!last || time > last.time) samples.push({ time, tokens, rate: rateAt(time, tokens) });
  while (samples[0].time < time - SECONDS) samples.shift();
  draw(time);
  return samples.at(-1).rate;
}

function rateAt(time, tokens) {
  const before = samples.findLast((sample) => sample.time <= time - SMOOTH_SECONDS) ?? samples[0];
  return before && time > before.time ? (tokens - before.tokens) / (time - before.time) : 0;
}

function draw(now) {
  const peak = Math.max(...samples.map((sample) => sample.rate));
  const top = Math.max(10, peak) * 1.1;
  const points = samples.map(({ time, rate }) => {
    const x = WIDTH * (1 - (now - time) / SECONDS);
    return `${x.toFixed(1)} ${(HEIGHT - (HEIGHT * rate) / top).toFixed(1)}`;
  });
  const line = `M${points.join("L")}`;
  const first = WIDTH * (1 - (now - samples[0].time) / SECONDS);
  chart.querySelector(".line").setAttribute("d", line);
  chart.querySelector(".area").setAttribute("d", `${line}L${WIDTH} ${HEIGHT}L${first.toFixed(1)} ${HEIGHT}Z`);
  setText(byId("peak"), peak > 0 ? `peak ${Math.round(peak)}` : "");
  chart.setAttribute("aria-label", `Tokens per second: ${Math.round(samples.at(-1).rate)} now, ${Math.round(peak)} at most`);
}
