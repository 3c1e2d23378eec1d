// A request as JSON, beside programs that send it, and what the server answers.

import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";

import { CodeBlock } from "../code_block";
import { getJson, post, ServerError } from "../server";
import { LANGUAGES, programIn, type Language } from "./programs";

const LAST = "headrace.try";

interface Example {
  path: string;
  title: string;
  body: unknown;
}

interface Reply {
  text: string;
  status: number | null; // null: none has come
  seconds: number | null; // null while it comes
}

interface OpenApi {
  paths: Record<string, { post?: Operation }>;
}

interface Operation {
  requestBody?: { content: Record<string, { examples?: Record<string, { value: unknown }> }> };
}

const examples = signal<Example[]>([]);
const path = signal("v1/chat/completions");
const body = signal(sessionStorage.getItem(LAST) ?? "");
const language = signal<Language>("curl");
const reply = signal<Reply | null>(null);
const sending = signal<AbortController | null>(null);

async function loadExamples(): Promise<void> {
  if (examples.value.length) return;
  const { paths } = await getJson<OpenApi>("openapi.json");
  examples.value = Object.entries(paths).flatMap(([path, { post }]) => {
    const found = post?.requestBody?.content["application/json"]?.examples ?? {};
    return Object.entries(found).map(([title, { value }]) => {
      return { path: path.slice(1), title, body: value };
    });
  });
  if (!body.value && examples.value.length) choose(0);
}

function choose(at: number): void {
  const example = examples.value[at]!;
  path.value = example.path;
  write(JSON.stringify(example.body, null, 2));
}

function write(text: string): void {
  body.value = text;
  sessionStorage.setItem(LAST, text);
}

function fault(): string | null {
  try {
    JSON.parse(body.value);
    return null;
  } catch (error) {
    return (error as Error).message;
  }
}

// Shows a response as it comes: JSON is indented once it is whole.
async function send(): Promise<void> {
  const abort = (sending.value = new AbortController());
  const startedAt = performance.now();
  let text = "";
  let status: number | null = null;
  const show = (seconds: number | null) => (reply.value = { text, status, seconds });
  show(null);
  try {
    const response = await post(path.value, JSON.parse(body.value), abort.signal);
    status = response.status;
    const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      text += value;
      show(null);
    }
    text = indented(text);
  } catch (error) {
    if (error instanceof ServerError) status = error.status;
    const said = abort.signal.aborted ? "Stopped." : (error as Error).message;
    text = text ? `${text}\n${said}` : said;
  }
  show((performance.now() - startedAt) / 1000);
  sending.value = null;
}

function indented(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // events
  }
}

export function Try() {
  useEffect(() => void loadExamples().catch(() => undefined), []);
  return (
    <section class="page try">
      <h1>Try a request</h1>
      <div class="columns">
        <Request />
        <Program />
      </div>
      <ReplyView />
    </section>
  );
}

function Request() {
  const wrong = fault();
  const found = examples.value;
  const chosen = found.findIndex(
    (one) => one.path === path.value && JSON.stringify(one.body, null, 2) === body.value,
  );
  return (
    <form onSubmit={(event) => (event.preventDefault(), void send())}>
      <label class="field">
        <span>Example</span>
        <select value={chosen} onChange={(event) => choose(Number(event.currentTarget.value))}>
          {chosen < 0 && <option value={-1}>Your request to /{path.value}</option>}
          {found.map((example, at) => (
            <option value={at}>
              /{example.path}: {example.title}
            </option>
          ))}
        </select>
      </label>
      <label class="field">
        <span>Body of POST /{path.value}</span>
        <textarea
          class="code"
          rows={16}
          spellcheck={false}
          value={body.value}
          aria-invalid={wrong !== null}
          onInput={(event) => write(event.currentTarget.value)}
        />
      </label>
      <div class="row">
        {sending.value ? (
          <button type="button" class="primary" onClick={() => sending.value?.abort()}>
            Stop
          </button>
        ) : (
          <button type="submit" class="primary" disabled={wrong !== null}>
            Send
          </button>
        )}
        {wrong && body.value && (
          <span class="wrong" role="status">
            {wrong}
          </span>
        )}
      </div>
    </form>
  );
}

function Program() {
  const url = new URL(path.value, document.baseURI).href;
  const { code, syntax } = programIn(language.value, url, body.value);
  return (
    <div>
      <fieldset class="choice">
        <legend>The same as a program</legend>
        {LANGUAGES.map((one) => (
          <label>
            <input
              type="radio"
              name="language"
              checked={one === language.value}
              onChange={() => (language.value = one)}
            />
            <span>{one}</span>
          </label>
        ))}
      </fieldset>
      <CodeBlock code={code} language={syntax} />
    </div>
  );
}

function ReplyView() {
  const shown = reply.value;
  if (!shown) return null;
  const { status, seconds, text } = shown;
  return (
    <section aria-label="Response" class="reply">
      <h2>Response</h2>
      <p class="muted" role="status">
        {status ? `Status ${status}` : seconds === null ? "Waiting …" : "No response"}
        {seconds !== null && ` after ${seconds.toFixed(2)} s`}
      </p>
      {text && <CodeBlock code={text} language={text.startsWith("{") ? "json" : "text"} />}
    </section>
  );
}
