// One message: a question, an answer with its thoughts, calls and figures, or a tool's result.

import { useMemo, useState } from "preact/hooks";

import { CopyButton } from "../copy_button";
import type { Answer, Message, ToolCall, ToolResult, UserMessage } from "./conversation";
import { current, update } from "./history";
import { answerAgain, goOn, isRunning, send } from "./generation";
import { RichText } from "./rich_text";

interface Place {
  at: number;
  isLast: boolean;
}

// A message that has not changed is not drawn again while another grows.
export function MessageView({ message, at, isLast }: { message: Message } & Place) {
  const isBusy = isRunning.value;
  return useMemo(() => {
    switch (message.role) {
      case "user":
        return <UserView message={message} at={at} />;
      case "assistant":
        return <AnswerView answer={message} at={at} isLast={isLast} />;
      case "tool":
        return <ResultView result={message} />;
    }
  }, [message, at, isLast, isBusy]);
}

function UserView({ message, at }: { message: UserMessage; at: number }) {
  const [isEdited, setEdited] = useState(false);
  if (isEdited) {
    const save = (text: string) => {
      setEdited(false);
      update(current.value.id, (all) => all.slice(0, at));
      void send({ ...message, text });
    };
    return (
      <Editor text={message.text} label="Send" onSave={save} onCancel={() => setEdited(false)} />
    );
  }
  return (
    <article class="message user" aria-label="You">
      <div class="bubble">
        {message.pictures.map(({ url, name }) => (
          <img src={url} alt={name} />
        ))}
        {message.text}
      </div>
      <div class="actions">
        <CopyButton text={message.text} label="Copy your message" />
        <EditButton label="Edit your message" onClick={() => setEdited(true)} />
      </div>
    </article>
  );
}

function EditButton({ label, onClick }: { label: string; onClick: () => void }) {
  return (
    <button
      class="quiet small"
      type="button"
      aria-label={label}
      onClick={onClick}
      disabled={isRunning.value}
    >
      Edit
    </button>
  );
}

interface EditorOptions {
  text: string;
  label: string;
  onSave: (text: string) => void;
  onCancel: () => void;
}

function Editor({ text, label, onSave, onCancel }: EditorOptions) {
  const [edited, setEdited] = useState(text);
  const onKeyDown = (event: KeyboardEvent) => event.key === "Escape" && onCancel();
  return (
    <form class="message editor" onSubmit={(event) => (event.preventDefault(), onSave(edited))}>
      <textarea
        aria-label="Edited text"
        value={edited}
        autofocus
        onKeyDown={onKeyDown}
        rows={Math.min(text.split("\n").length + 1, 16)}
        onInput={(event) => setEdited(event.currentTarget.value)}
      />
      <div class="row end">
        <button type="button" class="quiet" onClick={onCancel}>
          Cancel
        </button>
        <button type="submit" class="primary">
          {label}
        </button>
      </div>
    </form>
  );
}

function AnswerView({ answer, at, isLast }: { answer: Answer } & Place) {
  const [isEdited, setEdited] = useState(false);
  const { end, text, thoughts, calls, error } = answer;
  if (isEdited) {
    const save = (text: string) => {
      setEdited(false);
      const edited: Answer = { ...answer, text, stats: undefined };
      update(current.value.id, (all) => all.map((one, index) => (index === at ? edited : one)));
    };
    return <Editor text={text} label="Save" onSave={save} onCancel={() => setEdited(false)} />;
  }
  return (
    <article
      class="message answer"
      aria-label={`Answer of ${answer.model}`}
      aria-busy={end === "running"}
    >
      {thoughts && (
        <details class="folded">
          <summary>{text || calls.length || end !== "running" ? "Thoughts" : "Thinking …"}</summary>
          <RichText text={thoughts} />
        </details>
      )}
      {text && <RichText text={text} />}
      {end === "running" && !text && !thoughts && !calls.length && <Waiting />}
      {calls.map((call) => (
        <CallView call={call} />
      ))}
      {error && (
        <p class="wrong" role="alert">
          {error}
        </p>
      )}
      {end !== "running" && (
        <div class="actions">
          <CopyButton text={text} label="Copy this answer" />
          <EditButton label="Edit this answer" onClick={() => setEdited(true)} />
          <button
            class="quiet small"
            type="button"
            disabled={isRunning.value}
            onClick={() => answerAgain(at)}
          >
            Regenerate
          </button>
          {isLast && text && (end === "stopped" || end === "length" || end === "failed") && (
            <button class="quiet small" type="button" disabled={isRunning.value} onClick={goOn}>
              Continue
            </button>
          )}
          <Figures answer={answer} />
        </div>
      )}
      {end === "running" && text && (
        <div class="actions">
          <Figures answer={answer} />
        </div>
      )}
    </article>
  );
}

function Waiting() {
  return (
    <p class="waiting" aria-label="Waiting for the first token">
      <i /> <i /> <i />
    </p>
  );
}

const ENDS: Partial<Record<Answer["end"], string>> = {
  length: "cut off at the token limit",
  stopped: "stopped",
};

function Figures({ answer }: { answer: Answer }) {
  const { stats, end } = answer;
  const parts = [];
  if (stats?.tokensPerSecond) parts.push(`${digits(stats.tokensPerSecond)} tokens/s`);
  if (stats?.firstTokenMs) parts.push(`first token ${duration(stats.firstTokenMs)}`);
  if (stats?.tokens) parts.push(`${stats.isExact ? "" : "about "}${stats.tokens} tokens`);
  if (ENDS[end]) parts.push(ENDS[end]);
  return <span class="figures">{parts.join(" · ")}</span>;
}

function digits(value: number): string {
  return value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

function duration(ms: number): string {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

function CallView({ call }: { call: ToolCall }) {
  return (
    <details class="folded">
      <summary>
        Call of <code>{call.name}</code>
      </summary>
      <pre tabIndex={0}>{indented(call.arguments)}</pre>
    </details>
  );
}

function ResultView({ result }: { result: ToolResult }) {
  return (
    <details class="folded message">
      <summary>Result of the tool</summary>
      <pre tabIndex={0}>{indented(result.text)}</pre>
    </details>
  );
}

function indented(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
