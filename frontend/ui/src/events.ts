// Server-sent events of a response, by the HTML standard:
// https://html.spec.whatwg.org/multipage/server-sent-events.html
// EventSource sends no API key, so the body is read by fetch.

export interface ServerEvent {
  type: string;
  data: string;
}

// Yields the events of a body. A field that is neither `event` nor `data` is left out.
export async function* readEvents(response: Response): AsyncGenerator<ServerEvent> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop()!;
      for (const block of blocks) {
        const event = parse(block);
        if (event) yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined); // after an abort there is nothing to cancel
  }
}

function parse(block: string): ServerEvent | null {
  let type = "message";
  const data: string[] = [];
  for (const line of block.split(/\r?\n/)) {
    const value = line.slice(line.indexOf(":") + 1).replace(/^ /, "");
    if (line.startsWith("data:")) data.push(value);
    else if (line.startsWith("event:")) type = value;
  }
  return data.length ? { type, data: data.join("\n") } : null;
}
