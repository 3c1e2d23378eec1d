// Builds dist/ from src/: hashed assets, each also compressed by gzip and Brotli, the two pages,
// the licences of what is bundled, and the hash of the sources (tests/frontend/test_ui_build.py).
// Run: make ui

import { createHash } from "node:crypto";
import { cpSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { basename, join, relative } from "node:path";
import { brotliCompressSync, constants, gzipSync } from "node:zlib";
import { build } from "esbuild";

const DIST = "dist";
const HASH = /-[0-9A-Z]{8}\./;
const SOURCES = ["build.mjs", "package-lock.json", "package.json", "tsconfig.json"];
const SWAGGER = "node_modules/swagger-ui-dist";
const MIN_SAVED = 0.95; // a compressed file is kept where it is below this share

const sha256 = (data) => createHash("sha256").update(data).digest("hex");

function filesBelow(folder) {
  const found = readdirSync(folder, { recursive: true, withFileTypes: true });
  return found.filter((entry) => entry.isFile()).map((entry) => join(entry.parentPath, entry.name));
}

function hashOfSources() {
  const paths = [...SOURCES, ...filesBelow("src")].sort();
  return sha256(paths.map((path) => `${sha256(readFileSync(path))}  ${path}\n`).join(""));
}

const OPTIONS = {
  outdir: DIST,
  entryNames: "[dir]/[name]-[hash]",
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  legalComments: "none",
  metafile: true,
};

// The page at / and the reference at /docs share no file, so a server can leave out the page.
async function bundle() {
  const entries = (files) => files.map(([path, out]) => ({ in: `src/${path}`, out }));
  const ui = [
    ["main.tsx", "ui/main"],
    ["app.css", "ui/app"],
  ];
  const docs = [
    ["docs/docs.ts", "docs/docs"],
    ["docs/docs.css", "docs/docs"],
  ];
  const split = { splitting: true, chunkNames: "ui/[name]-[hash]" };
  const { metafile } = await build({ ...OPTIONS, ...split, entryPoints: entries(ui) });
  await build({ ...OPTIONS, entryPoints: entries(docs) });
  return metafile;
}

function copySwagger() {
  for (const name of ["swagger-ui-bundle.js", "swagger-ui.css"]) {
    const text = readFileSync(join(SWAGGER, name), "utf8");
    const data = text.replace(/\n?\/[/*]# sourceMappingURL=\S+( \*\/)?\s*$/, "\n");
    const hash = sha256(data).slice(0, 8).toUpperCase();
    writeFileSync(join(DIST, "docs", name.replace(".", `-${hash}.`)), data);
  }
}

// The chunks that a file imports at once: the browser is to fetch them beside it.
function preloads(metafile, folder, name) {
  const entry = Object.keys(metafile.outputs).find((path) => path.includes(`/${name}-`));
  const static_ = metafile.outputs[entry].imports.filter((one) => one.kind === "import-statement");
  const links = static_.map(
    ({ path }) => `<link rel="modulepreload" href="${folder}/${basename(path)}">`,
  );
  return links.join("\n");
}

// Replaces each `%FOLDER/NAME%` by the hashed name of that asset.
function writePages(metafile) {
  const paths = ["ui", "docs"].flatMap((folder) => filesBelow(join(DIST, folder)));
  const names = Object.fromEntries(
    paths.map((path) => relative(DIST, path)).map((path) => [path.replace(HASH, "."), path]),
  );
  for (const path of ["src/index.html", "src/docs/docs.html"]) {
    const html = readFileSync(path, "utf8")
      .replace("%preloads%", preloads(metafile, "ui", "main"))
      .replace(/%([\w./-]+)%/g, (_, name) => {
        if (!names[name]) throw new Error(`${path}: there is no asset ${name}`);
        return names[name];
      });
    writeFileSync(join(DIST, basename(path)), html);
  }
}

function licenceOf(folder) {
  const about = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const texts = readdirSync(folder).filter((name) => /^(licen[cs]e|notice)/i.test(name));
  const said = texts.map((name) => readFileSync(join(folder, name), "utf8").trim());
  return `${about.name} ${about.version} (${about.license})\n\n${said.join("\n\n")}\n`;
}

// The licences of all packages of which a part is in dist/.
function writeLicences(metafile) {
  const folders = new Set([SWAGGER]);
  for (const path of Object.keys(metafile.inputs)) {
    const found = /^(.*node_modules\/(?:@[^/]+\/)?[^/]+)\//.exec(path);
    if (found) folders.add(found[1]);
  }
  const swagger = readFileSync(join(SWAGGER, "swagger-ui-bundle.js.LICENSE.txt"), "utf8");
  const texts = [...folders].sort().map(licenceOf);
  const inside = `What swagger-ui-bundle.js contains\n\n${swagger.trim()}\n`;
  writeFileSync(
    join(DIST, "docs", "licences.txt"),
    [...texts, inside].join(`\n${"-".repeat(78)}\n\n`),
  );
}

function compress() {
  const quality = { [constants.BROTLI_PARAM_QUALITY]: constants.BROTLI_MAX_QUALITY };
  for (const path of filesBelow(DIST)) {
    const data = readFileSync(path);
    const kinds = {
      gz: gzipSync(data, { level: 9 }),
      br: brotliCompressSync(data, { params: quality }),
    };
    for (const [suffix, packed] of Object.entries(kinds)) {
      if (packed.length < MIN_SAVED * data.length) writeFileSync(`${path}.${suffix}`, packed);
    }
  }
}

function report() {
  for (const path of filesBelow(DIST)
    .filter((path) => path.endsWith(".br"))
    .sort()) {
    console.log(String(readFileSync(path).length).padStart(8), path);
  }
}

rmSync(DIST, { recursive: true, force: true });
mkdirSync(join(DIST, "docs"), { recursive: true });
const metafile = await bundle();
copySwagger();
writePages(metafile);
writeLicences(metafile);
cpSync("src/icon.svg", join(DIST, "docs", "icon.svg"));
compress();
writeFileSync(join(DIST, "sources.sha256"), `${hashOfSources()}\n`);
report();
