// The frame of the page: the bar with the tabs, what is wrong with the connection, one tab.

import { useEffect, useState } from "preact/hooks";
import type { ComponentType } from "preact";

import { KeyDialog } from "./key_dialog";
import { connection } from "./server";
import { TABS, tab, type Tab } from "./tabs";
import { ThemeButton } from "./theme";

export function App() {
  return (
    <>
      <a class="skip" href="#main" onClick={skip}>
        Skip to the content
      </a>
      <header class="bar">
        <span class="brand">Headrace</span>
        <nav aria-label="Tabs">
          {TABS.map((one) => (
            <a href={`#${one.id}`} aria-current={one === tab.value ? "page" : undefined}>
              {one.title}
            </a>
          ))}
          <a href="docs">API</a>
        </nav>
        <ThemeButton />
      </header>
      <ConnectionNotice />
      <main id="main" tabIndex={-1}>
        <TabContent key={tab.value.id} tab={tab.value} />
      </main>
      <KeyDialog />
    </>
  );
}

// A link to #main would change the tab, which is the location's hash.
function skip(event: Event): void {
  event.preventDefault();
  document.getElementById("main")!.focus();
}

function TabContent({ tab }: { tab: Tab }) {
  const [loaded] = useState(() => tab.load());
  const [content, setContent] = useState<{ Tab: ComponentType } | null>(
    loaded instanceof Promise ? null : { Tab: loaded },
  );
  useEffect(() => {
    document.title = `${tab.title} · Headrace`;
    if (loaded instanceof Promise) {
      loaded.then(
        (Tab) => setContent({ Tab }),
        () => setContent({ Tab: NotLoaded }),
      );
    }
  }, []);
  return content && <content.Tab />;
}

// The file of a tab is gone after an update of the server, and out of reach while it is down.
function NotLoaded() {
  return (
    <section class="page">
      <h1>This tab could not be loaded</h1>
      <p>
        The server has been updated or does not answer.{" "}
        <button type="button" onClick={() => location.reload()}>
          Load the page again
        </button>
      </p>
    </section>
  );
}

function ConnectionNotice() {
  const texts = {
    up: "",
    down: "The server does not answer. The page tries again until it does.",
    starting: "The server is starting or has lost a process. The page waits until it serves.",
  };
  const text = texts[connection.value];
  return (
    <div role="status" class="connection">
      {text && <p class="notice">{text}</p>}
    </div>
  );
}
