// Asks for the API key, once the server has refused a request for the lack of a valid one.

import { useEffect, useRef } from "preact/hooks";

import { closeQuestion, keyQuestion, setKey } from "./server";

export function KeyDialog() {
  const dialog = useRef<HTMLDialogElement>(null);
  const question = keyQuestion.value;
  useEffect(() => {
    if (question) dialog.current?.showModal();
    else dialog.current?.close();
  }, [question]);
  const submit = (event: SubmitEvent) => {
    event.preventDefault();
    const fields = new FormData(event.target as HTMLFormElement);
    setKey(String(fields.get("key")), fields.has("kept"));
  };
  return (
    <dialog ref={dialog} aria-labelledby="key-title" onCancel={closeQuestion}>
      {question && (
        <form onSubmit={submit}>
          <h2 id="key-title">API key</h2>
          <p>
            {question === "wrong"
              ? "The server does not accept this key."
              : "This server needs an API key."}
          </p>
          <label class="field">
            <span>Key</span>
            <input
              name="key"
              type="password"
              autocomplete="off"
              required
              autofocus
              aria-invalid={question === "wrong"}
            />
          </label>
          <label class="check">
            <input name="kept" type="checkbox" defaultChecked /> Keep it in this browser
          </label>
          <div class="row end">
            <button type="button" class="quiet" onClick={closeQuestion}>
              Cancel
            </button>
            <button type="submit" class="primary">
              Use this key
            </button>
          </div>
        </form>
      )}
    </dialog>
  );
}
