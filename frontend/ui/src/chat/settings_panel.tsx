// The settings of requests.

import { forgetKey, hasKey, models } from "../server";
import { modelInUse } from "./generation";
import { NUMBERS, faultIn, isObject, resetSettings, settings, type Settings } from "./settings";

function set(changed: Partial<Settings>): void {
  settings.value = { ...settings.value, ...changed };
}

export function SettingsPanel({ onClose }: { onClose: () => void }) {
  const { system, stop, tools, others } = settings.value;
  return (
    <aside class="settings" aria-label="Settings">
      <div class="row head">
        <h2>Settings</h2>
        <button type="button" class="quiet small" onClick={onClose}>
          Close
        </button>
      </div>
      <ModelField />
      <label class="field">
        <span>System prompt</span>
        <textarea rows={3} value={system} onInput={(e) => set({ system: e.currentTarget.value })} />
      </label>
      <p class="muted">An empty field is the server's default.</p>
      <div class="numbers">
        {NUMBERS.map((field) => (
          <NumberField {...field} />
        ))}
      </div>
      <label class="field">
        <span>Stop texts, one on each line</span>
        <textarea rows={2} value={stop} onInput={(e) => set({ stop: e.currentTarget.value })} />
      </label>
      <JsonField
        label="Tools, as JSON"
        value={tools}
        isWanted={Array.isArray}
        example='[{"type": "function", "function": {"name": …}}]'
        onChange={(tools) => set({ tools })}
      />
      <JsonField
        label="Other fields of the request, as JSON"
        value={others}
        isWanted={isObject}
        example='{"reasoning_effort": "low"}'
        onChange={(others) => set({ others })}
      />
      <div class="row">
        <button type="button" onClick={resetSettings}>
          Reset
        </button>
        {hasKey() && (
          <button type="button" onClick={() => (forgetKey(), set({}))}>
            Forget the API key
          </button>
        )}
      </div>
    </aside>
  );
}

function ModelField() {
  return (
    <label class="field">
      <span>Model</span>
      <select value={modelInUse()} onChange={(e) => set({ model: e.currentTarget.value })}>
        {models.value.map(({ id, parent }) => (
          <option value={id}>{parent ? `${id} (adapter of ${parent})` : id}</option>
        ))}
      </select>
    </label>
  );
}

function NumberField({ name, label, min, max, step }: (typeof NUMBERS)[number]) {
  const { numbers } = settings.value;
  return (
    <label class="field">
      <span>{label}</span>
      <input
        type="number"
        min={min}
        max={max}
        step={step}
        value={numbers[name] ?? ""}
        placeholder="default"
        onInput={(e) => set({ numbers: { ...numbers, [name]: e.currentTarget.value } })}
      />
    </label>
  );
}

interface JsonFieldOptions {
  label: string;
  value: string;
  example: string;
  isWanted: (value: unknown) => boolean;
  onChange: (text: string) => void;
}

function JsonField({ label, value, example, isWanted, onChange }: JsonFieldOptions) {
  const fault = faultIn(value, isWanted);
  return (
    <label class="field">
      <span>{label}</span>
      <textarea
        class="code"
        rows={3}
        value={value}
        placeholder={example}
        spellcheck={false}
        aria-invalid={fault !== null}
        onInput={(e) => onChange(e.currentTarget.value)}
      />
      {fault && <span class="wrong">{fault} The field is left out.</span>}
    </label>
  );
}
