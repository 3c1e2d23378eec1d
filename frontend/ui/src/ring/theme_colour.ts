// Colours of the theme for a canvas, which reads no custom properties.

import { signal } from "@preact/signals";

// Counts changes of the theme.
export const themeChanges = signal(0);

const changed = () => (themeChanges.value += 1);
new MutationObserver(changed).observe(document.documentElement, {
  attributeFilter: ["data-theme"],
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);

// Returns the value that a custom property has within an element.
export function colourOf(element: Element, property: string): string {
  const probe = document.createElement("span");
  probe.style.color = `var(${property})`;
  element.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}
