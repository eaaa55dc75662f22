"use strict";
const MEAN = -1; // as a head: the mean over all heads
const ROLLOUT = -1; // as a layer: rollout through all layers
const SIMILARITY = -2; // as a layer: similarity of features, of a backbone without a head
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const floats = (text) => new Float32Array(bytes(text).buffer);
const percent = (fraction) => `${(100 * fraction).toFixed(1)}\u00a0%`;
const palettes = { attention: bytes(data.palettes.attention), heatmap: bytes(data.palettes.heatmap) };
const state = { image: -1, mode: "patch", layer: undefined, head: MEAN, cell: 0, pinned: false };
let one, thumbnails;

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

function press(buttons, isPressed) {
  for (const button of buttons) button.setAttribute("aria-pressed", String(isPressed(button)));
}

// Reading the data.

function decode(image) {
  if (!image.decoded) {
    image.decoded = { levels: bytes(image.levels), rowMax: floats(image.rowMax), prefix: floats(image.prefix) };
    image.hasSimilarity = image.maps.some(([layer]) => layer === SIMILARITY);
    image.mapIndex = new Map(image.maps.map(([layer, head], index) => [`${layer} ${head}`, index]));
    for (const map of image.heatmaps) map.decoded = { levels: bytes(map.levels), fractions: floats(map.fractions) };
  }
  return image;
}

function attentionRow(layer, head, cell) {
  const map = one.mapIndex.get(`${layer} ${head}`);
  if (map === undefined) return undefined;
  const count = one.cellGrid[0] * one.cellGrid[1];
  const query = map * (count + 1) + (state.mode === "query" ? 0 : 1 + cell);
  return {
    levels: one.decoded.levels.subarray(query * count, (query + 1) * count),
    max: one.decoded.rowMax[query],
    prefix: one.decoded.prefix[query],
  };
}

// The same position in another grid: the grid of patches, or of cells that merge several patches.
function convertIndex(cell, [rows, columns], [newRows, newColumns]) {
  const row = Math.floor((Math.floor(cell / columns) * newRows) / rows);
  return row * newColumns + Math.floor(((cell % columns) * newColumns) / columns);
}

const heatmap = () => one.heatmaps.find((map) => map.method === state.mode);
const grid = () => (heatmap() ? one.grid : one.cellGrid);

// Drawing.

function paint(canvas, levels, [rows, columns], palette, opacity) {
  if (canvas.width !== columns || canvas.height !== rows) {
    canvas.width = columns;
    canvas.height = rows;
  }
  const image = new ImageData(columns, rows);
  for (let index = 0; index < levels.length; index++) {
    const level = levels[index];
    image.data[4 * index] = palette[3 * level];
    image.data[4 * index + 1] = palette[3 * level + 1];
    image.data[4 * index + 2] = palette[3 * level + 2];
    image.data[4 * index + 3] = opacity === undefined ? 255 : 255 * opacity * (level / 255) ** 0.7;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function draw() {
  const map = heatmap();
  const row = map ? undefined : attentionRow(state.layer, state.head, state.cell);
  const palette = map ? palettes.heatmap : palettes.attention;
  paint($("over"), map ? map.decoded.levels : row.levels, grid(), palette, $("opacity").value / 100);
  paint($("bar"), Uint8Array.from({ length: 256 }, (_, level) => level), [1, 256], palette);
  $("low").textContent = map ? percent(map.limits[0]) : "0";
  $("high").textContent = map ? `${percent(map.limits[1])}${map.exceeded ? " or more" : ""}` : percent(row.max);
  placeMark();
  $("status").textContent = map ? describeHeatmap(map) : describeAttention(row);
  const cell = convertIndex(state.cell, grid(), one.cellGrid);
  for (const [layer, head, canvas] of thumbnails) {
    paint(canvas, attentionRow(layer, head, cell).levels, one.cellGrid, palettes.attention);
  }
}

function placeMark() {
  const [rows, columns] = grid(), mark = $("mark").style;
  mark.left = `${(100 * (state.cell % columns)) / columns}%`;
  mark.top = `${(100 * Math.floor(state.cell / columns)) / rows}%`;
  mark.width = `${100 / columns}%`;
  mark.height = `${100 / rows}%`;
  $("mark").hidden = state.mode === "query";
  $("mark").classList.toggle("pinned", state.pinned);
}

function describePatch() {
  const columns = grid()[1];
  return `the patch at row ${Math.floor(state.cell / columns)}, column ${state.cell % columns}`;
}

function describeHeatmap(map) {
  const share = `In this heatmap, ${describePatch()} has ${percent(map.decoded.fractions[state.cell])} of the sum.`;
  if (map.score === null) return share;
  return `${share} Faithfulness on this image (insertion minus deletion AUC): ${map.score.toFixed(2)}; 0 is a random order, 1 the maximum.`;
}

function describeAttention(row) {
  if (state.layer === SIMILARITY) {
    return `Similarity of ${state.mode === "query" ? "the average patch" : describePatch()} to all others: ${percent(row.max)} is the largest.`;
  }
  const where = state.layer === ROLLOUT ? "Rollout through all layers" : `Layer ${state.layer}, ${describeHead(state.head)}`;
  const who = state.mode === "query" ? one.query : describePatch();
  const own = percent((row.levels[state.cell] / 255) * row.max);
  const self = state.mode === "query" ? "" : `, ${own} to itself`;
  const prefix = one.prefixName ? `, ${percent(row.prefix)} to ${one.prefixName}` : "";
  return `${where}: ${who} gives ${percent(row.max)} of its attention to the brightest patch${self}${prefix}.`;
}

const describeHead = (head) => (head === MEAN ? "mean over heads" : `head ${head}`);

// Choosing what is shown.

function chooseMode(mode) {
  const before = grid();
  state.mode = mode;
  const map = heatmap();
  state.cell = convertIndex(state.cell, before, grid());
  press($("modes").children, (button) => button.dataset.mode === mode);
  $("summary").textContent = summarise(map);
  if (one.hasSimilarity && mode === "patch") $("summary").textContent = "Move over the image, or tap it: colours show how similar the features of the selected patch are to those of all others.";
  $("heading").textContent = mode === "query" ? `Attention of ${one.query}` : "Attention of the selected patch";
  if (state.isHeatmap !== Boolean(map)) setSmoothing(Boolean(map) && Math.min(...one.grid) >= 8);
  state.isHeatmap = Boolean(map);
  drawBorders();
  draw();
}

function summarise(map) {
  if (map) {
    const target = map.classSpecific ? ` Explained class: ${one.target}.` : "";
    return `Heatmap: ${map.summary}.${target}`;
  }
  if (state.mode === "query") return `Attention of ${one.query}, from which the head predicts the class.`;
  return "Move over the image, or tap it: colours show the attention of the selected patch to all others.";
}

function chooseMap(layer, head) {
  state.layer = layer;
  state.head = head;
  pressMap();
  if (heatmap()) chooseMode("patch");
  else draw();
}

function pressMap() {
  const key = `${state.layer} ${state.head}`;
  press($("matrix").querySelectorAll("button"), (button) => button.dataset.map === key);
}

function move(cell) {
  if (cell === state.cell) return;
  state.cell = cell;
  draw();
}

function drawBorders() {
  const [rows, columns] = grid();
  $("lines").style.backgroundSize = `${100 / columns}% ${100 / rows}%`;
}

// Filling the page for one image.

function fill() {
  if (one.top.length) $("label").replaceChildren(document.createTextNode(`${one.top[0][0]} `), element("span", percent(one.top[0][1])));
  else $("label").replaceChildren(document.createTextNode("Backbone without a head"));
  const target = one.targetGiven ? `Explained class: ${one.target}, ${percent(one.probability)}. ` : "";
  $("where").textContent = `${target}${one.name}`;
  $("photo").src = one.image;
  $("photo").alt = one.name;
  $("photo").className = one.tiny ? "tiny" : "";
  $("frame").style.aspectRatio = `${one.size[1]} / ${one.size[0]}`;
  $("frame").style.width = `min(100%, 64vh * ${one.size[1] / one.size[0]})`;
  $("note").textContent = one.note;
  fillModes();
  fillMatrix();
  fillBars();
}

function fillModes() {
  const names = [["patch", one.hasSimilarity ? "similarity of a patch" : "attention of a patch"], ["query", `attention of ${one.query}`]];
  $("modes").replaceChildren(...names.map(([mode, name]) => modeButton(mode, name)));
  for (const map of one.heatmaps) {
    const button = modeButton(map.method, map.method);
    if (map.score !== null) {
      button.append(element("small", map.score.toFixed(2)));
      button.title = `insertion AUC minus deletion AUC: ${map.score.toFixed(2)}`;
    }
    $("modes").append(button);
  }
}

function modeButton(mode, name) {
  const button = element("button", name);
  button.dataset.mode = mode;
  button.onclick = () => chooseMode(mode);
  return button;
}

function fillMatrix() {
  const matrix = $("matrix"), layers = [...one.layers, ROLLOUT, ...(one.hasSimilarity ? [SIMILARITY] : [])], heads = [MEAN, ...one.heads];
  matrix.style.gridTemplateColumns = `max-content repeat(${layers.length}, minmax(30px, 64px))`;
  const columns = layers.map((layer) => element("b", layer === ROLLOUT ? "rollout" : layer === SIMILARITY ? "similarity" : layer));
  matrix.replaceChildren(element("b", "layer", "side"), ...columns);
  thumbnails = [];
  for (const head of heads) {
    matrix.append(element("b", head === MEAN ? "mean" : `head ${head}`, "side"));
    for (const layer of layers) {
      const exists = one.mapIndex.has(`${layer} ${head}`) && (layer >= 0 || head === MEAN);
      matrix.append(exists ? thumbnail(layer, head) : element("span"));
    }
  }
}

function thumbnail(layer, head) {
  const button = element("button"), canvas = element("canvas");
  const name = layer === SIMILARITY ? "similarity of features" : layer === ROLLOUT ? "rollout through all layers" : `layer ${layer}, ${describeHead(head)}`;
  button.dataset.map = `${layer} ${head}`;
  button.title = name;
  button.setAttribute("aria-label", name);
  button.onclick = () => chooseMap(layer, head);
  canvas.style.aspectRatio = `${one.size[1]} / ${one.size[0]}`;
  button.append(canvas);
  thumbnails.push([layer, head, canvas]);
  return button;
}

function fillBars() {
  const classes = [...one.top];
  if (one.target && !classes.some(([label]) => label === one.target)) classes.push([one.target, one.probability]);
  $("bars").replaceChildren();
  for (const [label, probability] of classes) {
    const className = label === one.target ? "target" : "";
    const track = element("div", undefined, className), bar = element("i");
    bar.style.width = `${100 * probability}%`;
    track.append(bar);
    const name = element("span", label, className);
    name.title = label;
    $("bars").append(name, track, element("em", percent(probability)));
  }
}

function show(number) {
  state.image = number;
  one = decode(data.images[number]);
  state.pinned = false;
  if (!heatmap() && state.mode !== "query") state.mode = "patch";
  const values = one.heatmaps.find((map) => map.method === one.method).decoded.fractions;
  state.cell = convertIndex(values.indexOf(Math.max(...values)), one.grid, grid());
  if (state.layer === undefined || !one.mapIndex.has(`${state.layer} ${state.head}`)) {
    state.layer = one.hasSimilarity ? SIMILARITY : one.layers[Math.round(0.6 * (one.layers.length - 1))]; // a little past the middle
    state.head = MEAN;
  }
  press($("strip").children, (button) => Number(button.dataset.number) === number);
  fill();
  pressMap();
  state.isHeatmap = undefined;
  chooseMode(state.mode);
}

function setSmoothing(on) {
  $("smooth").checked = on;
  $("over").className = on ? "" : "hard";
}

// Events.

const clamp = (index, count) => Math.min(Math.max(index, 0), count - 1);

function cellAt(event) {
  const box = $("frame").getBoundingClientRect(), [rows, columns] = grid();
  const x = Math.floor(((event.clientX - box.left) / box.width) * columns);
  const y = Math.floor(((event.clientY - box.top) / box.height) * rows);
  return clamp(y, rows) * columns + clamp(x, columns);
}

$("frame").addEventListener("pointermove", (event) => {
  if (!state.pinned || event.pointerType !== "mouse") move(cellAt(event));
});
$("frame").addEventListener("pointerdown", (event) => {
  if (event.pointerType === "mouse") state.pinned = !state.pinned || cellAt(event) !== state.cell;
  state.cell = cellAt(event);
  draw();
});
$("frame").addEventListener("keydown", (event) => {
  const [rows, columns] = grid(), [row, column] = [Math.floor(state.cell / columns), state.cell % columns];
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (event.key in steps) {
    const [down, right] = steps[event.key];
    move(clamp(row + down, rows) * columns + clamp(column + right, columns));
  } else if (event.key === " ") $("frame").classList.toggle("bare");
  else if (event.key === "Enter") {
    state.pinned = !state.pinned;
    placeMark();
  } else return;
  event.preventDefault();
});
$("opacity").addEventListener("input", draw);
$("smooth").addEventListener("change", () => setSmoothing($("smooth").checked));
$("grid").addEventListener("change", () => ($("lines").hidden = !$("grid").checked));

data.images.forEach((image, number) => {
  const button = element("button"), picture = element("img");
  picture.src = image.image;
  picture.alt = image.name;
  if (image.tiny) picture.className = "tiny";
  button.title = image.top.length ? `${image.top[0][0]}: ${image.name}` : image.name;
  button.dataset.number = number;
  button.onclick = () => show(number);
  button.append(picture);
  $("strip").append(button);
});
$("strip").hidden = data.images.length < 2;
$("all").hidden = false;
show(0);
