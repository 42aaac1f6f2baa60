// Bundles src/ into ../assets: app.js, app.css, index.html, the licences of what is in them, and the
// digest of the sources, by which a test sees whether they were built from what is there.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync, copyFileSync, mkdirSync } from "node:fs";
import { dirname, join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const assets = join(here, "..", "assets");

function sources(folder) {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) => {
    if (entry.name === "node_modules" || entry.name.startsWith(".")) return [];
    const path = join(folder, entry.name);
    return entry.isDirectory() ? sources(path) : [relative(here, path).split(sep).join("/")];
  });
}

function digest() {
  const hash = createHash("sha256");
  for (const name of sources(here).sort()) {
    hash.update(`${name}\0`).update(readFileSync(join(here, name))).update("\0");
  }
  return hash.digest("hex");
}

mkdirSync(assets, { recursive: true });
const result = await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.tsx" },
  outdir: assets,
  bundle: true,
  minify: true,
  metafile: true,
  format: "iife",
  target: ["es2022"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  charset: "ascii",
});

// A saved page holds the script between tags.
const script = readFileSync(join(assets, "app.js"), "utf8");
if (/<\/script|<!--/i.test(script)) throw new Error("app.js would end its own script element");

const packages = new Set(
  Object.keys(result.metafile.inputs)
    .map((path) => /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(path)?.[1])
    .filter(Boolean),
);
const licences = [...packages].sort().map((name) => {
  const { version, license } = JSON.parse(
    readFileSync(join(here, "node_modules", name, "package.json"), "utf8"),
  );
  const text = readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8");
  return `${name} ${version} (${license})\n\n${text.trim()}\n`;
});
writeFileSync(join(assets, "LICENSES.txt"), licences.join(`\n${"-".repeat(72)}\n\n`));
copyFileSync(join(here, "index.html"), join(assets, "index.html"));
writeFileSync(join(assets, "sources.sha256"), `${digest()}\n`);
