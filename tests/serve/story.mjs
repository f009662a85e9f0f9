// Shared parts of the Node client tests: the server's address, its demo pictures, and running the tests.

import { readFileSync } from "node:fs";

export const base = (process.argv[2] ?? "http://127.0.0.1:8000").replace(/\/$/, "");
export const key = process.argv[3] ?? "none";
export const HELLO = [{ role: "user", content: "Hello!" }];
export const GREETING = "Hello! Show me a picture.";
export const WEATHER = {
  type: "object",
  properties: { city: { type: "string", enum: ["Bonn", "Paris"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};

/** Folder of the demo model's pictures. */
const pictures = process.env.BURSAR_PICTURES ?? new URL("../../model/demo/pictures", import.meta.url).pathname;
export const picture = (name) => readFileSync(`${pictures}/${name}`);
export const dataUri = (name) => `data:image/png;base64,${picture(name).toString("base64")}`;

/** Runs all tests, prints a line for each, and exits with 1 if one failed. */
export async function tell(stories) {
  let failed = 0;
  for (const [name, story] of Object.entries(stories)) {
    try {
      await story();
      console.log(`  ok: ${name}`);
    } catch (error) {
      failed += 1;
      console.log(`  FAILED: ${name}\n${error.stack}`);
    }
  }
  process.exit(failed ? 1 : 0);
}
