// Elements, numbers and colours.

export const $ = (id) => document.getElementById(id);
export const percent = (fraction) => `${(100 * fraction).toFixed(1)}\u00a0%`;
export const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
export const floats = (text) => new Float32Array(bytes(text).buffer);

// The content of a data URI, which the policy of this page does not allow to be fetched.
export function toBlob(uri) {
  const [head, text] = uri.split(",", 2);
  return new Blob([bytes(text)], { type: head.slice(5).split(";")[0] });
}

export function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

export function press(buttons, isPressed) {
  for (const button of buttons) button.setAttribute("aria-pressed", String(isPressed(button)));
}

// Colours from dark to bright, interpolated: those of the other pages of Vitrail (matplotlib's).
const STOPS = {
  attention: [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], // viridis
  heatmap: [[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]], // inferno
};

function makePalette(stops) {
  return Array.from({ length: 256 }, (_, level) => {
    const place = (level / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    return stops[low].map((value, channel) => value + (place - low) * (stops[low + 1][channel] - value));
  });
}

export const palettes = { attention: makePalette(STOPS.attention), heatmap: makePalette(STOPS.heatmap) };

// Values from 0 to 1 as one pixel per patch; with an opacity, low values are transparent.
export function paint(canvas, values, [rows, columns], palette, opacity) {
  canvas.width = columns;
  canvas.height = rows;
  const image = new ImageData(columns, rows);
  values.forEach((value, index) => {
    const level = Math.round(255 * Math.min(1, Math.max(0, value)));
    image.data.set(palette[level], 4 * index);
    image.data[4 * index + 3] = opacity === undefined ? 255 : 255 * opacity * value ** 0.7;
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
}
