// The page: an image goes to the server, its answer and the reasons come back.

import { get, post, ServerError, setToken } from "./api.js";
import { $, bytes, element, floats, paint, palettes, percent, press, toBlob } from "./draw.js";

const MEAN = -1; // as a head: the mean over all heads
const ROLLOUT = -1; // as a layer: rollout through all layers
const TOP = 5;

let model; // what GET /model answers
let shown; // the current image: see `open`
const state = { mode: "patch", layer: undefined, head: MEAN, cell: 0, pinned: false, tool: "look" };

// Asking the server.

async function start() {
  try {
    model = await get("/model");
  } catch (error) {
    if (error.status === 401) $("login").hidden = false;
    else fail(error);
    return;
  }
  $("login").hidden = true;
  fillCard();
  const examples = await get("/examples").catch(() => []);
  $("examples").replaceChildren(...examples.map(exampleButton));
  $("examples").hidden = examples.length === 0;
}

async function open(file, name = "image") {
  if (!model || !file) return;
  $("error").hidden = true;
  $("drop").classList.add("busy");
  shown?.stop.abort();
  const stop = new AbortController();
  try {
    const answer = await post("/predict", { crop: 1, top: TOP }, file, stop.signal);
    const crop = toBlob(answer.crop);
    const { channels, pixels } = model.preprocess;
    const same = [1, 3].includes(channels) && pixels === "uint8"; // the crop is exact
    shown = {
      ...{ name, stop, answer, before: answer, target: answer.index, explanations: new Map(), erased: new Set() },
      ...{ body: same ? crop : file, cropped: same ? 1 : undefined, grid: model.grid ?? [1, 1] },
    };
    $("photo").src = answer.crop;
    show();
    await explain();
  } catch (error) {
    fail(error);
  } finally {
    $("drop").classList.remove("busy");
  }
}

async function explain() {
  if (!model.explains) return;
  const one = shown, target = one.target;
  if (!one.packed) {
    const packed = await post("/attention", { format: "packed", cropped: one.cropped }, one.body, one.stop.signal);
    one.packed = unpack(packed);
    if (one !== shown) return;
    fillMatrix();
    chooseMode(state.mode);
  }
  if (!one.explanations.has(target)) {
    $("summary").textContent = "computing the explanation ...";
    const query = { class: model.classes[target] === undefined ? undefined : String(target), cropped: one.cropped };
    one.explanations.set(target, await post("/explain", query, one.body, one.stop.signal));
  }
  if (one !== shown || target !== one.target) return;
  fillModes();
  const first = one.explanations.size === 1 && !state.pinned;
  chooseMode(first ? one.explanations.get(target).method : state.mode);
  if (first && isHeatmap()) move(hottest(heatmap()));
}

let erasing = false;
async function predictErased() {
  if (erasing) return; // the loop below takes the newest state when it comes round
  erasing = true;
  const one = shown;
  try {
    for (let asked; asked !== one.erased.size && one === shown; ) {
      asked = one.erased.size;
      const query = { cropped: one.cropped, mask: [...one.erased].join(","), class: String(one.target), top: TOP };
      one.answer = await post("/predict", query, one.body, one.stop.signal);
      if (one === shown) fillAnswer();
    }
  } catch (error) {
    fail(error);
  } finally {
    erasing = false;
  }
}

function fail(error) {
  if (error.name === "AbortError") return;
  $("error").textContent = error instanceof ServerError ? error.message : `This page failed: ${error.message}`;
  $("error").hidden = false;
}

// Reading answers.

function unpack(packed) {
  const index = new Map(packed.maps.map(([layer, head], number) => [`${layer} ${head}`, number]));
  return { ...packed, levels: bytes(packed.levels), rowMax: floats(packed.row_max), prefixes: floats(packed.prefix), index };
}

function attentionRow(layer, head, cell) {
  const { packed } = shown, map = packed.index.get(`${layer} ${head}`);
  if (map === undefined) return undefined;
  const count = packed.grid[0] * packed.grid[1];
  const query = map * (count + 1) + (state.mode === "query" ? 0 : 1 + cell);
  const levels = packed.levels.subarray(query * count, (query + 1) * count);
  return { values: Array.from(levels, (level) => level / 255), max: packed.rowMax[query], prefix: packed.prefixes[query] };
}

function hottest(map) {
  const values = map.values.flat();
  return values.indexOf(Math.max(...values));
}

const explanation = () => shown?.explanations.get(shown.target);
const heatmap = () => explanation()?.heatmaps.find((map) => map.method === state.mode);
const isHeatmap = () => Boolean(heatmap());
const grid = () => (state.tool === "erase" || isHeatmap() || !shown.packed ? shown.grid : shown.packed.grid);

function convertIndex(cell, [rows, columns], [newRows, newColumns]) {
  const row = Math.floor((Math.floor(cell / columns) * newRows) / rows);
  return row * newColumns + Math.floor(((cell % columns) * newColumns) / columns);
}

// Drawing.

function draw() {
  const [rows, columns] = grid(), map = heatmap();
  $("lines").style.backgroundSize = `${100 / columns}% ${100 / rows}%`;
  Object.assign($("mark").style, {
    left: `${(100 * (state.cell % columns)) / columns}%`,
    top: `${(100 * Math.floor(state.cell / columns)) / rows}%`,
    width: `${100 / columns}%`,
    height: `${100 / rows}%`,
  });
  $("mark").hidden = state.mode === "query" && state.tool === "look";
  $("mark").classList.toggle("pinned", state.pinned);
  drawErased();
  if (state.tool === "erase") {
    $("status").textContent = describeErasing();
    $("legend").hidden = true;
    return;
  }
  if (map) drawHeatmap(map);
  else if (shown.packed) drawAttention();
  else {
    $("over").width = 1;
    $("status").textContent = model.explains ? "" : "This engine computes predictions only; serve the run folder to see attention and reasons.";
  }
  $("legend").hidden = !map && !shown.packed;
}

function drawHeatmap(map) {
  const values = map.values.flat(), high = Math.max(...values) || 1, total = values.reduce((a, b) => a + b, 0) || 1;
  paint($("over"), values.map((value) => value / high), shown.grid, palettes.heatmap, $("opacity").value / 100);
  drawLegend(palettes.heatmap, high / total);
  $("status").textContent =
    `${describePatch()} has ${percent(values[state.cell] / total)} of this heatmap. ` +
    `Faithfulness on this image (insertion minus deletion AUC): ${map.faithfulness.toFixed(2)}; 0 is a random order, 1 the maximum.`;
}

function drawAttention() {
  const row = attentionRow(state.layer, state.head, state.cell);
  paint($("over"), row.values, shown.packed.grid, palettes.attention, $("opacity").value / 100);
  drawLegend(palettes.attention, row.max);
  const where = state.layer === ROLLOUT ? "Rollout through all layers" : `Layer ${state.layer}, ${describeHead(state.head)}`;
  const who = state.mode === "query" ? shown.packed.query : describePatch();
  const self = state.mode === "query" ? "" : `, ${percent(row.values[state.cell] * row.max)} to itself`;
  const prefix = shown.packed.prefix_tokens ? `, ${percent(row.prefix)} to the prefix tokens` : "";
  $("status").textContent = `${where}: ${who} gives ${percent(row.max)} of its attention to the brightest patch${self}${prefix}.`;
  for (const [layer, head, canvas] of shown.thumbnails ?? []) {
    paint(canvas, attentionRow(layer, head, state.cell).values, shown.packed.grid, palettes.attention);
  }
}

function drawLegend(palette, high) {
  paint($("bar"), Array.from({ length: 256 }, (_, level) => level / 255), [1, 256], palette);
  $("high").textContent = percent(high);
}

function drawErased() {
  const [rows, columns] = shown.grid, canvas = $("erased");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  context.fillStyle = "rgb(127 127 127)";
  for (const patch of shown.erased) context.fillRect(patch % columns, Math.floor(patch / columns), 1, 1);
  $("restore").hidden = shown.erased.size === 0;
}

function describePatch() {
  const columns = grid()[1];
  return `Row ${Math.floor(state.cell / columns)}, column ${state.cell % columns}`;
}

function describeErasing() {
  const gone = shown.erased.size, all = shown.grid[0] * shown.grid[1];
  const here = shown.erased.has(state.cell) ? "erased" : "there";
  return `${describePatch()} is ${here}. ${gone} of ${all} patches are erased. Draw over the image to erase more.`;
}

const describeHead = (head) => (head === MEAN ? "mean over heads" : `head ${head}`);

// Choosing what is shown.

function show() {
  const { height, width } = sizeOfInput();
  $("all").hidden = false;
  $("frame").style.aspectRatio = `${width} / ${height}`;
  $("frame").style.width = `min(100%, 60vh * ${width / height})`;
  $("photo").classList.toggle("tiny", Math.max(width, height) <= 64);
  $("erase").disabled = !model.grid;
  $("reasons").hidden = !model.explains;
  $("layers").hidden = true;
  Object.assign(state, { cell: 0, pinned: false });
  chooseTool("look");
  fillAnswer();
  fillModes();
}

function sizeOfInput() {
  const { size } = model.preprocess;
  return Array.isArray(size) ? { height: size[0], width: size[1] } : { height: size, width: size };
}

function chooseMode(mode) {
  const before = grid();
  state.mode = mode;
  if (!isHeatmap() && !["patch", "query"].includes(mode)) state.mode = "patch";
  state.cell = convertIndex(state.cell, before, grid());
  press($("modes").children, (button) => button.dataset.mode === state.mode);
  const map = heatmap();
  if (map) {
    const target = map.class_specific ? ` Explained class: ${explanation().class.label}.` : "";
    $("summary").textContent = `Heatmap: ${map.summary}.${target}`;
  } else if (state.mode === "query") $("summary").textContent = `Attention of ${shown.packed?.query ?? "[CLS]"}, from which the head predicts the class.`;
  else $("summary").textContent = "Move over the image, or tap it: colours show where the selected patch looks.";
  draw();
}

function chooseTool(tool) {
  const before = grid();
  state.tool = tool;
  state.cell = convertIndex(state.cell, before, grid());
  press([$("look"), $("erase")], (button) => button.id === tool);
  $("frame").classList.toggle("erasing", tool === "erase");
  draw();
}

async function chooseTarget(index) {
  shown.target = index;
  fillAnswer();
  if (!shown.answer.top.some((one) => one.index === index) || shown.erased.size) await predictErasedAgain();
  await explain().catch(fail);
}

async function predictErasedAgain() {
  const one = shown;
  const query = { cropped: one.cropped, mask: [...one.erased].join(","), class: String(one.target), top: TOP };
  one.answer = await post("/predict", query, one.body, one.stop.signal).catch((error) => (fail(error), one.answer));
  if (!one.erased.size) one.before = { ...one.before, class: one.answer.class };
  if (one === shown) fillAnswer();
}

// Filling the page.

function fillAnswer() {
  const { answer, before, target } = shown;
  const rows = [...answer.top];
  if (answer.class && !rows.some((one) => one.index === target)) rows.push(answer.class);
  $("bars").replaceChildren(...rows.map((one) => barButton(one, one.index === target)));
  const now = probabilityOf(answer, target), then = probabilityOf(before, target);
  $("change").textContent =
    shown.erased.size && now !== undefined && then !== undefined
      ? `${model.classes[target]}: ${percent(then)} with all patches, ${percent(now)} without ${shown.erased.size}.`
      : "";
  $("odd").hidden = !before.odd;
  $("odd").textContent = before.odd ? `This image is unlike the training images (p-value ${before.p_value.toPrecision(2)}), so the answer may be meaningless.` : "";
  const predicted = target === before.index;
  $("reasons-title").textContent = predicted ? `Why ${model.classes[target]}?` : `Why not ${model.classes[target]}?`;
}

function probabilityOf(answer, index) {
  const one = [...answer.top, answer.class].find((entry) => entry?.index === index);
  return one?.probability;
}

function barButton(one, isTarget) {
  const button = element("button"), track = element("span", undefined, "track"), bar = element("i");
  bar.style.width = `${100 * one.probability}%`;
  track.append(bar);
  const name = element("span", one.label);
  name.title = one.label;
  button.append(name, track, element("em", percent(one.probability)));
  button.setAttribute("aria-pressed", String(isTarget));
  button.setAttribute("aria-label", `${one.label}, ${percent(one.probability)}. Explain this class`);
  button.onclick = () => chooseTarget(one.index);
  const item = element("div");
  item.setAttribute("role", "listitem");
  item.append(button);
  return item;
}

function fillModes() {
  const names = [["patch", "attention of a patch"], ["query", `attention of ${shown.packed?.query ?? "[CLS]"}`]];
  const buttons = names.map(([mode, name]) => modeButton(mode, name));
  for (const map of explanation()?.heatmaps ?? []) {
    const button = modeButton(map.method, map.method), score = element("small", map.faithfulness.toFixed(2));
    score.title = "faithfulness: insertion minus deletion AUC";
    button.append(score);
    buttons.push(button);
  }
  $("modes").replaceChildren(...buttons);
}

function modeButton(mode, name) {
  const button = element("button", name);
  button.dataset.mode = mode;
  button.setAttribute("aria-pressed", String(mode === state.mode));
  button.onclick = () => {
    chooseTool("look");
    chooseMode(mode);
  };
  return button;
}

function fillMatrix() {
  const { packed } = shown, layers = [...new Set(packed.maps.map(([layer]) => layer))];
  const heads = [...new Set(packed.maps.map(([, head]) => head))].sort((a, b) => a - b);
  shown.thumbnails = [];
  const cells = [element("b"), ...heads.map((head) => element("b", head === MEAN ? "mean" : String(head)))];
  for (const layer of layers) {
    cells.push(element("b", layer === ROLLOUT ? "rollout" : String(layer), "side"));
    for (const head of heads) cells.push(packed.index.has(`${layer} ${head}`) ? mapButton(layer, head) : element("span"));
  }
  $("matrix").style.gridTemplateColumns = `max-content repeat(${heads.length}, minmax(26px, 54px))`;
  $("matrix").replaceChildren(...cells);
  $("layers").hidden = false;
  if (state.layer === undefined || !packed.index.has(`${state.layer} ${state.head}`)) {
    const own = layers.filter((layer) => layer !== ROLLOUT);
    state.layer = own[Math.round(0.6 * (own.length - 1))]; // a little past the middle
    state.head = MEAN;
  }
  pressMap();
}

function mapButton(layer, head) {
  const button = element("button"), canvas = element("canvas");
  button.dataset.map = `${layer} ${head}`;
  button.setAttribute("aria-label", layer === ROLLOUT ? "rollout" : `layer ${layer}, ${describeHead(head)}`);
  button.append(canvas);
  button.onclick = () => {
    Object.assign(state, { layer, head });
    pressMap();
    chooseTool("look");
    chooseMode(isHeatmap() ? "patch" : state.mode);
  };
  shown.thumbnails.push([layer, head, canvas]);
  return button;
}

function pressMap() {
  press($("matrix").querySelectorAll("button"), (button) => button.dataset.map === `${state.layer} ${state.head}`);
}

function exampleButton(example) {
  const button = element("button"), picture = element("img");
  picture.src = example.image;
  picture.alt = `example: ${example.label}`;
  if (example.tiny) picture.className = "tiny";
  button.append(picture);
  button.onclick = () => open(toBlob(example.image), example.label);
  return button;
}

function fillCard() {
  const { metrics = {}, preprocess, limits } = model, entries = [];
  const size = sizeOfInput();
  $("title").textContent = model.name;
  document.title = `${model.name} · Vitrail`;
  $("subtitle").textContent = `${model.classes.length} classes, ${size.width} x ${size.height} pixels, ${model.engine}`;
  for (const [split, name] of [["test", "test accuracy"], ["val", "validation accuracy"]]) {
    const found = metrics[split];
    if (found?.accuracy === undefined || !found.interval) continue;
    const [low, high] = found.interval;
    entries.push([name, `${percent(found.accuracy)} (${percent(low)} to ${percent(high)})`]);
  }
  if (model.data?.name) entries.push(["trained on", model.data.name]);
  entries.push(["classes", String(model.classes.length)]);
  entries.push(["probabilities", model.temperature ? "calibrated on validation images" : "plain softmax, not calibrated"]);
  entries.push(["input", `${size.width} x ${size.height}, ${preprocess.channels === 1 ? "grey" : `${preprocess.channels} channels`}`]);
  entries.push(["limits", `${(limits.bytes / 2 ** 20).toFixed(0)} MB, ${limits.pixels / 1e6} megapixels`]);
  entries.push(["sha256", model.sha256.slice(0, 12)]);
  $("card").replaceChildren(
    ...entries.map(([name, value]) => {
      const entry = element("div");
      entry.append(element("dt", name), element("dd", value));
      return entry;
    }),
  );
  $("class-count").textContent = `${model.classes.length} classes`;
  $("class-list").textContent = model.classes.join(" · ");
  $("classes").replaceChildren(...model.classes.map((name) => Object.assign(element("option"), { value: name })));
  $("usage").textContent =
    `curl --data-binary @cat.jpg ${location.origin}/predict\n\n` +
    `import vitrail\nvitrail.client("${location.origin}").predict("cat.jpg")`;
}

// Events.

function cellAt(event) {
  const box = $("frame").getBoundingClientRect(), [rows, columns] = grid();
  const clamp = (place, count) => Math.min(Math.max(Math.floor(place * count), 0), count - 1);
  return clamp((event.clientY - box.top) / box.height, rows) * columns + clamp((event.clientX - box.left) / box.width, columns);
}

function eraseAt(cell) {
  if (shown.erased.has(cell)) return;
  shown.erased.add(cell);
  draw();
  predictErased();
}

function move(cell) {
  if (cell === state.cell) return;
  state.cell = cell;
  draw();
}

$("frame").addEventListener("pointermove", (event) => {
  if (state.tool === "erase") {
    move(cellAt(event));
    if (event.buttons) eraseAt(cellAt(event));
  } else if (!state.pinned || event.pointerType !== "mouse") move(cellAt(event));
});
$("frame").addEventListener("pointerdown", (event) => {
  const cell = cellAt(event);
  if (state.tool === "erase") {
    $("frame").setPointerCapture(event.pointerId);
    state.cell = cell;
    eraseAt(cell);
    return;
  }
  if (event.pointerType === "mouse") state.pinned = !state.pinned || cell !== state.cell;
  state.cell = cell;
  draw();
});
$("frame").addEventListener("keydown", (event) => {
  const [rows, columns] = grid(), row = Math.floor(state.cell / columns), column = state.cell % columns;
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (event.key in steps) {
    const [down, right] = steps[event.key];
    const clamp = (value, count) => Math.min(Math.max(value, 0), count - 1);
    move(clamp(row + down, rows) * columns + clamp(column + right, columns));
  } else if (event.key === "Enter" && state.tool === "erase") eraseAt(state.cell);
  else if (event.key === "Enter") {
    state.pinned = !state.pinned;
    draw();
  } else if (event.key === " ") $("frame").classList.toggle("bare");
  else return;
  event.preventDefault();
});
$("look").onclick = () => chooseTool("look");
$("erase").onclick = () => chooseTool("erase");
$("restore").onclick = () => {
  shown.erased.clear();
  shown.answer = shown.before;
  fillAnswer();
  draw();
};
$("opacity").addEventListener("input", draw);
$("why").addEventListener("submit", (event) => {
  event.preventDefault();
  const wanted = $("class").value.trim().toLowerCase();
  const index = model.classes.findIndex((name) => name.toLowerCase() === wanted);
  if (index >= 0) chooseTarget(index);
  else fail(new ServerError(0, `No class is called "${$("class").value}".`));
});
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken($("token").value.trim());
  start();
});
for (const id of ["file", "photo-input"]) {
  $(id).addEventListener("change", (event) => {
    open(event.target.files[0], event.target.files[0]?.name);
    event.target.value = "";
  });
}
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    $("drop").classList.add("over");
  });
}
for (const kind of ["dragleave", "drop"]) document.addEventListener(kind, () => $("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  open(event.dataTransfer.files[0], event.dataTransfer.files[0]?.name);
});
document.addEventListener("paste", (event) => {
  const file = [...(event.clipboardData?.files ?? [])][0];
  if (file) open(file, "pasted image");
});
start();
