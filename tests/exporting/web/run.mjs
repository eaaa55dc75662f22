// Runs one batch through onnxruntime-web: node run.mjs MODEL PIXELS SHAPE OUT
import { readFileSync, writeFileSync } from "node:fs";
import * as ort from "onnxruntime-web/wasm";

const [model, pixels, shape, out] = process.argv.slice(2);
ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create(new Uint8Array(readFileSync(model)));
const bytes = readFileSync(pixels);
const data = new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
const input = new ort.Tensor("float32", data, JSON.parse(shape));
const { logits } = await session.run({ pixels: input });
writeFileSync(out, Buffer.from(logits.data.buffer, logits.data.byteOffset, logits.data.byteLength));
