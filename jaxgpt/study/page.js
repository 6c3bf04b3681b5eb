"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const bytes = Uint8Array.from(atob(data.weights), c => c.charCodeAt(0));
const T = data.tokens.length, triangle = T * (T + 1) / 2;
const at = (l, n, i, j) => j > i ? 0 : bytes[(l * data.heads + n) * triangle + i * (i + 1) / 2 + j] / 255;
const tokens = [...document.querySelectorAll(".t")], heads = [...document.querySelectorAll(".h")];
const rows = [...document.querySelectorAll("[aria-labelledby=h-next] tbody tr")], large = document.getElementById("large");
let head = [data.layers - 1, 0], kept = T - 1, shown = kept;
const quoted = i => `"${data.tokens[i]}"`;
const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw(canvas, l, n) {
  canvas.width = canvas.height = T;
  const context = canvas.getContext("2d"), image = context.createImageData(T, T);
  const [r, g, b] = color("--ink").split(" ").map(Number);
  for (let i = 0; i < T; i++) for (let j = 0; j <= i; j++)
    image.data.set([r, g, b, 255 * Math.sqrt(at(l, n, i, j))], 4 * (i * T + j));
  context.putImageData(image, 0, 0);
}
// Draw the chosen head with the tokens on both axes, or every n-th token if they would overlap.
function enlarge(l, n, row) {
  const ratio = devicePixelRatio, width = large.clientWidth, context = large.getContext("2d"), font = "12px monospace";
  const labels = data.tokens.map(token => token.length > 10 ? token.slice(0, 9) + "\u2026" : token);
  context.font = font;
  const margin = 8 + Math.max(...labels.map(label => context.measureText(label).width));
  const cell = (width - margin - 1) / T, side = T * cell, every = Math.ceil(12 / cell), ink = color("--ink");
  large.width = width * ratio;
  large.height = (side + margin) * ratio;
  context.scale(ratio, ratio);
  context.font = font;
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.strokeStyle = color("--line");
  context.strokeRect(margin, 0.5, side, side);
  for (let i = 0; i < T; i++) {
    for (let j = 0; j <= i; j++) {
      context.fillStyle = `rgb(${ink} / ${Math.sqrt(at(l, n, i, j)) * (i === row ? 1 : 0.45)})`;
      context.fillRect(margin + j * cell, i * cell, cell, cell);
    }
    if (i !== row && (i % every || Math.abs(i - row) < every)) continue;
    context.fillStyle = color(i === row ? "--mark" : "--fg");
    context.fillText(labels[i], margin - 4, (i + 0.5) * cell);
    context.save();
    context.translate(margin + (i + 0.5) * cell, side + 4);
    context.rotate(-Math.PI / 2);
    context.fillText(labels[i], 0, 0);
    context.restore();
  }
}
function show(i) {
  shown = i;
  const [l, n] = head, seen = [], accent = color("--accent");
  tokens.forEach((token, j) => {
    const p = at(l, n, i, j);
    token.style.backgroundColor = p ? `rgb(${accent} / ${p * 0.85})` : "";
    if (j === i) token.setAttribute("aria-current", "true"); else token.removeAttribute("aria-current");
    if (p >= 0.005) seen.push([p, j]);
  });
  rows.forEach((row, j) => row.classList.toggle("on", j === i));
  seen.sort((a, b) => b[0] - a[0]);
  const list = seen.slice(0, 5).map(([p, j]) => `${quoted(j)} (${j}) ${Math.round(100 * p)}%`).join(", ");
  document.getElementById("status").textContent =
    `Layer ${l}, head ${n}: token ${i}, ${quoted(i)}, attends to ${list}`;
  enlarge(l, n, i);
}
function choose(l, n) {
  head = [l, n];
  heads.forEach(h => h.setAttribute("aria-pressed", String(+h.dataset.l === l && +h.dataset.n === n)));
  document.getElementById("chosen").textContent = `Layer ${l}, head ${n}: the token of each row attends to the tokens of the columns.`;
  show(shown);
}
// Move the focus in a list with keys, by the given number of elements.
function moveBy(list, steps) {
  list.forEach(each => each.addEventListener("keydown", e => {
    const to = list[list.indexOf(each) + steps[e.key]];
    if (to) { to.focus(); e.preventDefault(); }
  }));
}
tokens.forEach((token, i) => {
  token.addEventListener("mouseenter", () => show(i));
  token.addEventListener("mouseleave", () => show(kept));
  for (const kind of ["focus", "click"]) token.addEventListener(kind, () => { kept = i; show(i); });
});
heads.forEach(h => h.addEventListener("click", () => choose(+h.dataset.l, +h.dataset.n)));
moveBy(tokens, { ArrowLeft: -1, ArrowRight: 1 });
moveBy(heads, { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -data.heads, ArrowDown: data.heads });
function all() {
  heads.forEach(h => draw(h.firstChild, +h.dataset.l, +h.dataset.n));
  choose(...head);
}
document.documentElement.classList.add("on-js");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
addEventListener("resize", () => show(shown));
all();
