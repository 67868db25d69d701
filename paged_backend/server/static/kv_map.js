// Draws the blocks of the KV cache: each in its request's colour, as high as it is full.

import { byId, count, plural } from "./elements.js";

const GAP = 2;
const LEAST_CELLS = 384;
const GOLDEN_ANGLE = 137.508;
const canvas = byId("map");
const tip = byId("tip");
const isDark = matchMedia("(prefers-color-scheme: dark)");

let shown = null;
let grid = null;
let highlighted = null;
let lastOwners = [];

export function colorOf(number, { faded = false } = {}) {
  const hue = (number * GOLDEN_ANGLE + 175) % 360;
  const [light, strength] = isDark.matches ? (faded ? [0.4, 0.035] : [0.72, 0.11]) : faded ? [0.84, 0.035] : [0.66, 0.12];
  return `oklch(${light} ${strength} ${hue.toFixed(1)})`;
}

export function startMap() {
  new ResizeObserver(draw).observe(canvas.parentElement);
  isDark.addEventListener("change", draw);
  canvas.addEventListener("pointermove", showTip);
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
}

export function showMap(map) {
  if (shown?.model !== map.model || map.cells.owners.length < shown.cells.owners.length) lastOwners = []; // another engine
  shown = map;
  map.cells.owners.forEach((owner, index) => {
    if (owner >= 0) lastOwners[index] = owner;
  });
  draw();
}

// Shows the blocks of one request alone; null: of all.
export function highlight(number) {
  highlighted = number;
  draw();
}

// How many blocks lie beyond those that are drawn.
export const numBeyond = () =>
  grid === null || shown.blocks_per_cell > 1 ? 0 : shown.stats.num_blocks - grid.cells;

function layOut(width) {
  const numTouched = shown.cells.owners.length;
  const wanted = Math.max(LEAST_CELLS, Math.ceil(numTouched / 128) * 128);
  const numBlocks = shown.blocks_per_cell > 1 ? numTouched : shown.stats.num_blocks;
  const area = width * Math.min(300, Math.max(150, width * 0.4));
  const size = Math.max(6, Math.min(24, Math.floor(Math.sqrt(area / Math.min(wanted, numBlocks)))));
  const columns = Math.floor((width + GAP) / size);
  const step = (width + GAP) / columns; // so that rows end at the edge
  const rows = Math.ceil(Math.min(wanted, numBlocks) / columns);
  return { cells: Math.min(rows * columns, numBlocks), columns, step, height: rows * step - GAP };
}

function draw() {
  const width = canvas.parentElement.clientWidth;
  if (!width || !shown?.stats.num_blocks) return;
  grid = layOut(width);
  const ratio = devicePixelRatio || 1;
  const [pixelWidth, pixelHeight] = [Math.round(width * ratio), Math.max(1, Math.round(grid.height * ratio))];
  if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
    [canvas.width, canvas.height] = [pixelWidth, pixelHeight];
    canvas.style.height = `${grid.height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, grid.height);
  const style = getComputedStyle(document.documentElement);
  const colors = Object.fromEntries(["free", "cached", "dot"].map((name) => [name, style.getPropertyValue(`--cell-${name}`)]));
  for (let index = 0; index < grid.cells; index += 1) drawCell(context, index, colors);
  canvas.setAttribute("aria-label", summary());
}

function drawCell(context, index, colors) {
  const { cells, blocks_per_cell: perCell, stats } = shown;
  const size = grid.step - GAP;
  const x = (index % grid.columns) * grid.step;
  const y = Math.floor(index / grid.columns) * grid.step;
  const owner = cells.owners[index] ?? -1;
  context.globalAlpha = highlighted !== null && owner !== highlighted ? 0.2 : 1;
  box(context, x, y, size, colors.free);
  if (cells.num_cached[index]) {
    const alpha = context.globalAlpha;
    context.globalAlpha = alpha * Math.max(0.35, cells.num_cached[index] / perCell);
    const known = lastOwners[index];
    box(context, x, y, size, known === undefined ? colors.cached : colorOf(known, { faded: true }));
    context.globalAlpha = alpha;
  }
  if (owner < 0) return;
  const alpha = context.globalAlpha;
  context.globalAlpha = alpha * 0.28;
  box(context, x, y, size, colorOf(owner));
  context.globalAlpha = alpha;
  const share = cells.num_filled_slots[index] / (perCell * stats.block_size);
  context.save();
  context.beginPath();
  context.rect(x, y + size * (1 - share), size, size * share);
  context.clip();
  box(context, x, y, size, colorOf(owner));
  context.restore();
  if (cells.num_shared[index]) {
    context.fillStyle = colors.dot;
    context.beginPath();
    context.arc(x + size / 2, y + size / 2, Math.max(1.2, size * 0.17), 0, 7);
    context.fill();
  }
}

function box(context, x, y, size, color) {
  context.fillStyle = color;
  context.beginPath();
  context.roundRect(x, y, size, size, Math.min(3, size / 4));
  context.fill();
}

function summary() {
  const { num_blocks: total, num_free_blocks: free, num_cached_blocks: cached } = shown.stats;
  const numShared = shown.cells.num_shared.reduce((sum, value) => sum + value, 0);
  return (
    `The blocks of the KV cache: ${count(total - free)} of ${count(total)} held, ${count(numShared)} of them shared, ` +
    `${count(cached)} free but remembered, ${count(free - cached)} free.`
  );
}

function showTip(event) {
  if (shown === null || grid === null) return;
  const column = Math.min(grid.columns - 1, Math.floor(event.offsetX / grid.step));
  const index = Math.floor(event.offsetY / grid.step) * grid.columns + column;
  tip.hidden = index >= grid.cells;
  if (tip.hidden) return;
  tip.textContent = described(index);
  const left = Math.min(event.offsetX + 12, canvas.clientWidth - tip.offsetWidth);
  tip.style.left = `${Math.max(0, left)}px`;
  tip.style.top = `${event.offsetY + 16}px`;
}

function described(index) {
  const { cells, blocks_per_cell: perCell, stats } = shown;
  const owner = cells.owners[index] ?? -1;
  const name = perCell === 1 ? `Block ${index}` : `Blocks ${index * perCell} to ${(index + 1) * perCell - 1}`;
  if (owner < 0) return `${name}: ${cells.num_cached[index] ? "free, but remembered" : "free"}`;
  const capacity = cells.num_held[index] * stats.block_size;
  const shared = cells.num_shared[index] ? ", shared" : "";
  return `${name}: request ${owner}${shared}, ${cells.num_filled_slots[index]} of ${plural(capacity, "slot")} filled`;
}
