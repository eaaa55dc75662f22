"use strict";
const MEAN = -1, FLOW = -1;
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const floats = (text) => new Float32Array(bytes(text).buffer);
const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;
const colours = { look: bytes(data.colours.look), heat: bytes(data.colours.heat) };
const state = { image: -1, mode: "patch", layer: 0, head: MEAN, cell: 0, pinned: false };
let one, thumbs;

function element(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function press(buttons, isPressed) {
  for (const button of buttons) button.setAttribute("aria-pressed", String(isPressed(button)));
}

// What is asked of the data.

function unpacked(image) {
  if (!image.ready) {
    image.ready = { shares: bytes(image.shares), most: floats(image.most), prefix: floats(image.prefix) };
    image.places = new Map(image.maps.map(([layer, head], place) => [`${layer} ${head}`, place]));
    for (const heat of image.heats) Object.assign(heat, { ready: bytes(heat.shares), parts: floats(heat.values) });
  }
  return image;
}

function row(layer, head, cell) {
  const map = one.places.get(`${layer} ${head}`);
  if (map === undefined) return undefined;
  const count = one.cells[0] * one.cells[1];
  const query = map * (count + 1) + (state.mode === "reader" ? 0 : 1 + cell);
  return {
    shares: one.ready.shares.subarray(query * count, (query + 1) * count),
    most: one.ready.most[query],
    prefix: one.ready.prefix[query],
    cells: one.cells,
  };
}

// The same place in another grid: that of patches, or of the cells they are gathered into.
function moved(cell, [rows, columns], [down, across]) {
  return Math.floor((Math.floor(cell / columns) * down) / rows) * across + Math.floor(((cell % columns) * across) / columns);
}

const heat = () => one.heats.find((each) => each.method === state.mode);
const grid = () => (heat() ? one.grid : one.cells);

// Drawing.

function paint(canvas, shares, [rows, columns], palette, density) {
  if (canvas.width !== columns || canvas.height !== rows) {
    canvas.width = columns;
    canvas.height = rows;
  }
  const image = new ImageData(columns, rows);
  for (let place = 0; place < shares.length; place++) {
    const value = shares[place];
    image.data[4 * place] = palette[3 * value];
    image.data[4 * place + 1] = palette[3 * value + 1];
    image.data[4 * place + 2] = palette[3 * value + 2];
    image.data[4 * place + 3] = density === undefined ? 255 : 255 * density * (value / 255) ** 0.7;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function draw() {
  const shown = heat();
  const found = shown ? { shares: shown.ready } : row(state.layer, state.head, state.cell);
  const palette = shown ? colours.heat : colours.look;
  paint($("over"), found.shares, grid(), palette, $("strength").value / 100);
  paint($("bar"), Uint8Array.from({ length: 256 }, (_, value) => value), [1, 256], palette);
  $("least").textContent = shown ? percent(shown.ends[0]) : "0";
  $("most").textContent = shown ? `${percent(shown.ends[1])}${shown.more ? " or more" : ""}` : percent(found.most);
  place();
  say(found, shown);
  const cell = moved(state.cell, grid(), one.cells);
  for (const [layer, head, canvas] of thumbs) paint(canvas, row(layer, head, cell).shares, one.cells, colours.look);
}

function place() {
  const [rows, columns] = grid(), mark = $("mark").style;
  mark.left = `${(100 * (state.cell % columns)) / columns}%`;
  mark.top = `${(100 * Math.floor(state.cell / columns)) / rows}%`;
  mark.width = `${100 / columns}%`;
  mark.height = `${100 / rows}%`;
  $("mark").hidden = state.mode === "reader";
  $("mark").classList.toggle("pinned", state.pinned);
}

function say(found, shown) {
  const columns = grid()[1];
  const patch = `row ${Math.floor(state.cell / columns)}, column ${state.cell % columns}`;
  if (shown) {
    const score = `Faithfulness on this image: ${shown.score.toFixed(2)}, where 0 is chance and 1 the most.`;
    $("said").textContent = `The patch in ${patch} has ${percent(shown.parts[state.cell])} of the whole. ${score}`;
    return;
  }
  const where = state.layer === FLOW ? "Through all layers" : `In layer ${state.layer}, ${state.head === MEAN ? "on the mean of heads" : `head ${state.head}`}`;
  const who = state.mode === "reader" ? one.reader : `the patch in ${patch}`;
  const mine = percent((found.shares[state.cell] / 255) * found.most);
  const itself = state.mode === "reader" ? "" : `, ${mine} on itself`;
  const front = one.front ? `, ${percent(found.prefix)} on ${one.front}` : "";
  $("said").textContent = `${where}, ${who} spends ${percent(found.most)} of its attention on the brightest patch${itself}${front}.`;
}

// What is chosen.

function choose(mode) {
  const before = grid();
  state.mode = mode;
  const shown = heat();
  state.cell = moved(state.cell, before, grid());
  press($("modes").children, (button) => button.dataset.mode === mode);
  const target = shown && shown.classless ? "" : ` The class is ${one.target}.`;
  $("words").textContent = shown
    ? `${shown.words[0].toUpperCase()}${shown.words.slice(1)}.${target}`
    : mode === "patch"
      ? "Move over the image, or tap it: each patch gathers what it needs from the patches that light up."
      : `What ${one.reader} gathers, which is what the answer is read from.`;
  $("heading").textContent = mode === "reader" ? `Where ${one.reader} looks` : "Where this patch looks";
  if (state.kind !== Boolean(shown)) smoothing(Boolean(shown) && Math.min(...one.grid) >= 8);
  state.kind = Boolean(shown);
  lines();
  draw();
}

function look(layer, head) {
  state.layer = layer;
  state.head = head;
  press($("matrix").querySelectorAll("button"), (button) => button.dataset.map === `${layer} ${head}`);
  if (heat()) choose("patch");
  else draw();
}

function move(cell) {
  if (cell === state.cell) return;
  state.cell = cell;
  draw();
}

function lines() {
  const [rows, columns] = grid();
  $("lines").style.backgroundSize = `${100 / columns}% ${100 / rows}%`;
}

// What is there for one image.

function fill() {
  $("label").replaceChildren(document.createTextNode(`${one.top[0][0]} `), element("span", percent(one.top[0][1])));
  const why = one.asked ? `Why ${one.target}, ${percent(one.probability)}? ` : "";
  $("where").textContent = `${why}${one.name}`;
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
  const names = [["patch", "a patch looks"], ["reader", `${one.reader} looks`]];
  $("modes").replaceChildren(...names.map(([mode, name]) => modeButton(mode, name)));
  for (const each of one.heats) {
    const button = modeButton(each.method, each.method.replace("-", " "));
    button.append(element("small", each.score.toFixed(2)));
    button.title = `faithfulness ${each.score.toFixed(2)}`;
    $("modes").append(button);
  }
}

function modeButton(mode, name) {
  const button = element("button", name);
  button.dataset.mode = mode;
  button.onclick = () => choose(mode);
  return button;
}

function fillMatrix() {
  const matrix = $("matrix"), layers = [...one.layers, FLOW], heads = [MEAN, ...one.heads];
  matrix.style.gridTemplateColumns = `max-content repeat(${layers.length}, minmax(30px, 64px))`;
  matrix.replaceChildren(element("b", "layer", "side"), ...layers.map((layer) => element("b", layer === FLOW ? "all" : layer)));
  thumbs = [];
  for (const head of heads) {
    matrix.append(element("b", head === MEAN ? "mean" : `head ${head}`, "side"));
    for (const layer of layers) {
      const there = one.places.has(`${layer} ${head}`) && (layer !== FLOW || head === MEAN);
      matrix.append(there ? thumb(layer, head) : element("span"));
    }
  }
}

function thumb(layer, head) {
  const button = element("button"), canvas = element("canvas");
  const name = layer === FLOW ? "all layers, by rollout" : `layer ${layer}, ${head === MEAN ? "mean of heads" : `head ${head}`}`;
  button.dataset.map = `${layer} ${head}`;
  button.title = name;
  button.setAttribute("aria-label", name);
  button.onclick = () => look(layer, head);
  canvas.style.aspectRatio = `${one.size[1]} / ${one.size[0]}`;
  button.append(canvas);
  thumbs.push([layer, head, canvas]);
  return button;
}

function fillBars() {
  const guesses = [...one.top];
  if (!guesses.some(([label]) => label === one.target)) guesses.push([one.target, one.probability]);
  $("bars").replaceChildren();
  for (const [label, probability] of guesses) {
    const mine = label === one.target ? "mine" : "", track = element("div", undefined, mine), bar = element("i");
    bar.style.width = `${100 * probability}%`;
    track.append(bar);
    const name = element("span", label, mine);
    name.title = label;
    $("bars").append(name, track, element("em", percent(probability)));
  }
}

function show(number) {
  state.image = number;
  one = unpacked(data.images[number]);
  state.pinned = false;
  if (!one.heats.some((each) => each.method === state.mode) && state.mode !== "reader") state.mode = "patch";
  const values = one.heats.find((each) => each.method === one.method).parts;
  state.cell = moved(values.indexOf(Math.max(...values)), one.grid, grid());
  if (!one.places.has(`${state.layer} ${state.head}`) || state.fresh === undefined) {
    state.layer = one.layers[Math.round(0.6 * (one.layers.length - 1))];
    state.head = MEAN;
    state.fresh = false;
  }
  press($("strip").children, (button) => Number(button.dataset.number) === number);
  fill();
  press($("matrix").querySelectorAll("button"), (button) => button.dataset.map === `${state.layer} ${state.head}`);
  state.kind = undefined;
  choose(state.mode);
}

function smoothing(on) {
  $("smooth").checked = on;
  $("over").className = on ? "" : "hard";
}

// What people do.

function under(event) {
  const box = $("frame").getBoundingClientRect(), [rows, columns] = grid();
  const across = Math.floor(((event.clientX - box.left) / box.width) * columns);
  const down = Math.floor(((event.clientY - box.top) / box.height) * rows);
  const [column, line] = [Math.min(Math.max(across, 0), columns - 1), Math.min(Math.max(down, 0), rows - 1)];
  return line * columns + column;
}

$("frame").addEventListener("pointermove", (event) => {
  if (!state.pinned || event.pointerType !== "mouse") move(under(event));
});
$("frame").addEventListener("pointerdown", (event) => {
  if (event.pointerType === "mouse") state.pinned = !state.pinned || under(event) !== state.cell;
  state.cell = under(event);
  draw();
});
$("frame").addEventListener("keydown", (event) => {
  const [rows, columns] = grid(), [line, column] = [Math.floor(state.cell / columns), state.cell % columns];
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (event.key in steps) {
    const [down, across] = steps[event.key];
    move(Math.min(Math.max(line + down, 0), rows - 1) * columns + Math.min(Math.max(column + across, 0), columns - 1));
  } else if (event.key === " ") $("frame").classList.toggle("bare");
  else if (event.key === "Enter") {
    state.pinned = !state.pinned;
    place();
  } else return;
  event.preventDefault();
});
$("strength").addEventListener("input", draw);
$("smooth").addEventListener("change", () => smoothing($("smooth").checked));
$("grid").addEventListener("change", () => ($("lines").hidden = !$("grid").checked));

data.images.forEach((image, number) => {
  const button = element("button"), picture = element("img");
  picture.src = image.image;
  picture.alt = image.name;
  if (image.tiny) picture.className = "tiny";
  button.title = `${image.top[0][0]}: ${image.name}`;
  button.dataset.number = number;
  button.onclick = () => show(number);
  button.append(picture);
  $("strip").append(button);
});
$("strip").hidden = data.images.length < 2;
$("all").hidden = false;
show(0);
