// Asks for the results of an answer's tool calls, and sends them.

import type { ToolCall } from "./conversation";
import { send } from "./generation";

export function ToolResults({ calls }: { calls: ToolCall[] }) {
  const submit = (event: SubmitEvent) => {
    event.preventDefault();
    const fields = new FormData(event.target as HTMLFormElement);
    const results = calls.map(({ id }) => {
      return { role: "tool" as const, callId: id, text: String(fields.get(id) ?? "") };
    });
    void send(...results);
  };
  return (
    <form class="message results" onSubmit={submit}>
      {calls.map(({ id, name }) => (
        <label class="field">
          <span>
            Result of <code>{name}</code>
          </span>
          <textarea class="code" name={id} rows={2} placeholder='{"temperature": 21}' />
        </label>
      ))}
      <div class="row end">
        <button type="submit">Send results</button>
      </div>
    </form>
  );
}
