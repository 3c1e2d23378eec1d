// A request as programs that send it. The key is not written into them.

export const LANGUAGES = ["curl", "Python", "JavaScript"] as const;
export type Language = (typeof LANGUAGES)[number];

interface Program {
  code: string;
  syntax: string;
}

const KEY = "API_KEY"; // an environment variable

export function programIn(language: Language, url: string, body: string): Program {
  switch (language) {
    case "curl":
      return { code: inCurl(url, body), syntax: "bash" };
    case "Python":
      return { code: inPython(url, body), syntax: "python" };
    case "JavaScript":
      return { code: inJavaScript(url, body), syntax: "javascript" };
  }
}

function inCurl(url: string, body: string): string {
  const quoted = body.replaceAll("'", `'\\''`);
  return `curl --no-buffer ${url} \\
  -H "Authorization: Bearer $${KEY}" \\
  -H 'Content-Type: application/json' \\
  -d '${quoted}'`;
}

function inPython(url: string, body: string): string {
  return `import os

import httpx

key = os.environ.get("${KEY}", "")
body = ${pythonOf(parsed(body))}
headers = {"Authorization": f"Bearer {key}"}
with httpx.stream("POST", "${url}", json=body, headers=headers, timeout=None) as response:
    for line in response.iter_lines():
        print(line)`;
}

function inJavaScript(url: string, body: string): string {
  return `const key = process.env.${KEY} ?? "";
const body = ${JSON.stringify(parsed(body), null, 2)};
const response = await fetch("${url}", {
  method: "POST",
  headers: { Authorization: \`Bearer \${key}\`, "Content-Type": "application/json" },
  body: JSON.stringify(body),
});
for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
  process.stdout.write(piece);
}`;
}

function parsed(body: string): unknown {
  try {
    return JSON.parse(body);
  } catch {
    return {};
  }
}

// A value as a Python literal.
function pythonOf(value: unknown, indent = ""): string {
  const inner = `${indent}    `;
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) {
    const items = value.map((item) => `${inner}${pythonOf(item, inner)},\n`);
    return items.length ? `[\n${items.join("")}${indent}]` : "[]";
  }
  if (typeof value === "object") {
    const items = Object.entries(value).map(
      ([name, item]) => `${inner}${JSON.stringify(name)}: ${pythonOf(item, inner)},\n`,
    );
    return items.length ? `{\n${items.join("")}${indent}}` : "{}";
  }
  return JSON.stringify(value);
}
