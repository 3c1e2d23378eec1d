// The conversations there are.

import { conversations, current, isKept, open, remove, startNew } from "./history";
import { isRunning } from "./generation";

export function Sidebar({ onChoose }: { onChoose: () => void }) {
  return (
    <nav class="sidebar" aria-label="Conversations">
      <button type="button" disabled={isRunning.value} onClick={() => (startNew(), onChoose())}>
        New chat
      </button>
      <ul>
        {conversations.value.map((one) => (
          <li key={one.id}>
            <button
              type="button"
              class="quiet title"
              disabled={isRunning.value}
              aria-current={one.id === current.value.id ? "true" : undefined}
              onClick={() => (open(one), onChoose())}
            >
              {one.title}
            </button>
            <button
              type="button"
              class="quiet small delete"
              disabled={isRunning.value}
              aria-label={`Delete ${one.title}`}
              onClick={() => remove(one.id)}
            >
              Delete
            </button>
          </li>
        ))}
      </ul>
      <p class="muted">
        {isKept.value
          ? "Conversations stay in this browser."
          : "This browser keeps no conversations; they end with the page."}
      </p>
    </nav>
  );
}
