// Light or dark: as the system has it, until one is chosen.

import { effect, signal } from "@preact/signals";

const THEME = "headrace.theme";
const isDark = matchMedia("(prefers-color-scheme: dark)");

type Theme = "light" | "dark";
const chosen = signal(localStorage.getItem(THEME) as Theme | null);
const system = signal<Theme>(isDark.matches ? "dark" : "light");

isDark.addEventListener("change", () => (system.value = isDark.matches ? "dark" : "light"));

effect(() => {
  if (chosen.value) {
    document.documentElement.dataset.theme = chosen.value;
    localStorage.setItem(THEME, chosen.value);
  }
});

export function ThemeButton() {
  const other = (chosen.value ?? system.value) === "dark" ? "light" : "dark";
  return (
    <button
      class="quiet icon"
      type="button"
      onClick={() => (chosen.value = other)}
      aria-label={`Use ${other} colours`}
      title={`Use ${other} colours`}
    >
      <svg viewBox="0 0 20 20" aria-hidden="true">
        <circle cx="10" cy="10" r="6.500" fill="none" stroke="currentColor" stroke-width="1.500" />
        <path d="M10 3.500a6.500 6.500 0 0 1 0 13z" fill="currentColor" />
      </svg>
    </button>
  );
}
