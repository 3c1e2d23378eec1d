// The API reference: Swagger UI over /openapi.json. The key is the one of the page at /.

import { storeKey, storedKey } from "../api_key";

declare const SwaggerUIBundle: (options: Record<string, unknown>) => unknown;

interface Asked {
  headers: Record<string, string>;
}

const reference = document.getElementById("reference")!;
const form = document.getElementById("key") as HTMLFormElement;

function authorization(): Record<string, string> {
  const key = storedKey();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function show(): Promise<void> {
  const response = await fetch("openapi.json", { headers: authorization(), credentials: "omit" });
  if (response.status === 401) {
    askKey();
  } else if (response.ok) {
    render(await response.json());
  } else {
    reference.textContent = `The server answers ${response.status}: ${await response.text()}`;
  }
}

function askKey(): void {
  reference.hidden = true;
  form.hidden = false;
  document.getElementById("refusal")!.textContent = storedKey()
    ? "The server does not accept this key."
    : "This server needs an API key.";
  (form.elements.namedItem("key") as HTMLInputElement).focus();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const fields = new FormData(form);
  storeKey(String(fields.get("key")).trim(), fields.has("kept"));
  form.hidden = true;
  reference.hidden = false;
  start();
});

function render(spec: unknown): void {
  SwaggerUIBundle({
    spec,
    domNode: reference,
    deepLinking: true,
    defaultModelsExpandDepth: -1,
    validatorUrl: null,
    // A key that is entered in Swagger UI's own dialog goes first.
    requestInterceptor: (asked: Asked) => {
      asked.headers = { ...authorization(), ...asked.headers };
      return asked;
    },
  });
}

const isDark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(): void {
  const theme = localStorage.getItem("headrace.theme") ?? (isDark.matches ? "dark" : "light");
  document.documentElement.classList.toggle("dark-mode", theme === "dark");
}

function start(): void {
  show().catch((error) => {
    reference.textContent = `The server does not answer: ${error.message}. Load the page again.`;
  });
}

isDark.addEventListener("change", setTheme);
setTheme();
start();
