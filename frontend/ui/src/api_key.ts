// The API key, kept in this browser or until its tab is closed.

const KEY = "headrace.api-key";

export function storedKey(): string {
  return localStorage.getItem(KEY) ?? sessionStorage.getItem(KEY) ?? "";
}

export function storeKey(key: string, isKept: boolean): void {
  removeKey();
  (isKept ? localStorage : sessionStorage).setItem(KEY, key);
}

export function removeKey(): void {
  localStorage.removeItem(KEY);
  sessionStorage.removeItem(KEY);
}
