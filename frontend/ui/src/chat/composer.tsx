// Where a message is written, and images are added to it.

import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

import { takesImages } from "../server";
import type { Picture } from "./conversation";
import { isRunning, send, stop } from "./generation";
import { current } from "./history";

const draft = signal("");
const pictures = signal<Picture[]>([]);

async function add(files: Iterable<File>): Promise<void> {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  const read = await Promise.all(
    images.map(async (file) => ({ name: file.name, url: await urlOf(file) })),
  );
  pictures.value = [...pictures.value, ...read];
}

function urlOf(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function submit(event: Event): void {
  event.preventDefault();
  const text = draft.value.trim();
  if (isRunning.value || (!text && !pictures.value.length)) return;
  const message = { role: "user" as const, text, pictures: pictures.value };
  draft.value = "";
  pictures.value = [];
  void send(message);
}

function onKeyDown(event: KeyboardEvent): void {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
}

export function Composer() {
  const text = useRef<HTMLTextAreaElement>(null);
  const { id } = current.value;
  useEffect(() => {
    if (matchMedia("(hover: hover)").matches) text.current?.focus(); // no keyboard over a phone
  }, [id]);
  useEffect(() => fit(text.current!), [draft.value]);
  const onPaste = (event: ClipboardEvent) => {
    if (takesImages.value) void add(event.clipboardData?.files ?? []);
  };
  const onDrop = (event: DragEvent) => {
    if (!takesImages.value || !event.dataTransfer?.files.length) return;
    event.preventDefault();
    void add(event.dataTransfer.files);
  };
  return (
    <form class="composer" onSubmit={submit} onDrop={onDrop} onDragOver={(e) => e.preventDefault()}>
      <Pictures />
      <textarea
        ref={text}
        rows={1}
        aria-label="Message"
        placeholder="Write a message"
        value={draft.value}
        onInput={(event) => (draft.value = event.currentTarget.value)}
        onKeyDown={onKeyDown}
        onPaste={onPaste}
      />
      <div class="row">
        {takesImages.value && <AddImages />}
        <span class="hint">Enter sends, Shift+Enter begins a new line</span>
        {isRunning.value ? (
          <button type="button" class="primary" onClick={stop}>
            Stop
          </button>
        ) : (
          <button
            type="submit"
            class="primary"
            disabled={!draft.value.trim() && !pictures.value.length}
          >
            Send
          </button>
        )}
      </div>
    </form>
  );
}

// As high as its text; the style sheet has the limit.
function fit(area: HTMLTextAreaElement): void {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

function AddImages() {
  const input = useRef<HTMLInputElement>(null);
  return (
    <>
      <input
        ref={input}
        class="hidden"
        type="file"
        accept="image/*"
        multiple
        tabIndex={-1}
        aria-label="Images"
        onChange={(event) => {
          void add(event.currentTarget.files ?? []);
          event.currentTarget.value = "";
        }}
      />
      <button type="button" class="quiet" onClick={() => input.current?.click()}>
        Add images
      </button>
    </>
  );
}

function Pictures() {
  if (!pictures.value.length) return null;
  return (
    <ul class="pictures">
      {pictures.value.map((picture) => (
        <li>
          <img src={picture.url} alt={picture.name} />
          <button
            type="button"
            class="small"
            aria-label={`Remove ${picture.name}`}
            onClick={() => (pictures.value = pictures.value.filter((one) => one !== picture))}
          >
            Remove
          </button>
        </li>
      ))}
    </ul>
  );
}
