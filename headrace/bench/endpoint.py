"""The server under load, asked a few things before it begins."""

from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from headrace.bench.load import Target
from headrace.bench.workload import WORDS, TokenRates
from headrace.errors import BAD_JSON, ConfigError
from headrace.routes import CHAT, COMPLETIONS, EMBEDDINGS, GET, METRICS, MODELS, POST, TOKENIZE

PATHS = {
    "completions": COMPLETIONS,
    "chat": CHAT,
    "embeddings": EMBEDDINGS,
}
PROBE_WORDS = 100
PROBE_S = 60


@dataclass(frozen=True)
class Endpoint:
    """A base URL with one of its routes."""

    base_url: str
    kind: str  # of `PATHS`
    path: str
    headers: dict[str, str]

    @property
    def target(self) -> Target:
        """The URL under load."""
        return Target(self.base_url + self.path, self.headers)

    def model(self) -> str:
        """Return the first model that the server names."""
        answer = self._ask(GET, MODELS)
        try:
            name: str = answer["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise ConfigError(f"{self.base_url}/v1/models names no model; use --model") from None
        return name

    def metrics(self) -> str:
        """Return the server's metrics; nothing, where it has no such page."""
        try:
            answer = httpx.get(f"{self.base_url}{METRICS}", headers=self.headers, timeout=PROBE_S)
        except httpx.HTTPError:
            return ""
        return answer.text if answer.status_code == httpx.codes.OK else ""

    def rates(self, model: str, sample: str) -> TokenRates:
        """Find out how many tokens the model makes of words and, in `sample`, of bytes."""
        nothing = self._count(model, WORDS[0])
        words = self._count(model, " ".join(WORDS[: PROBE_WORDS + 1])) - nothing
        if not sample:
            return TokenRates(max(words, 1) / PROBE_WORDS)
        num_bytes = len(sample.encode()) - len(WORDS[0])
        per_byte = (self._count(model, sample) - nothing) / max(num_bytes, 1)
        return TokenRates(max(words, 1) / PROBE_WORDS, per_byte)

    def tokenize(self, model: str, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, from `/tokenize`."""
        answer = self._ask(POST, TOKENIZE, {"model": model, "prompt": text})
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise ConfigError(f"{self.base_url}/tokenize returns no `tokens`; --pretok needs them")
        return tuple(tokens)

    def _count(self, model: str, text: str) -> int:
        """Return the token counts of a prompt and of the template around it."""
        body: dict[str, Any] = {"model": model}
        if self.kind == "embeddings":
            body["input"] = text
        elif self.kind == "chat":
            body |= {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        else:
            body |= {"prompt": text, "max_tokens": 1}
        usage = self._ask("POST", self.path, body).get("usage") or {}
        if "prompt_tokens" not in usage:
            raise ConfigError(f"{self.base_url}{self.path} returns no `usage`")
        count: int = usage["prompt_tokens"]
        return count

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = httpx.request(
                method, self.base_url + path, json=body, headers=self.headers, timeout=PROBE_S
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(f"--base-url {self.base_url} cannot be reached: {error}") from None
        if answer.status_code != 200:
            raise ConfigError(
                f"{self.base_url}{path} answers with status {answer.status_code}: "
                f"{answer.text[:300]}"
            )
        try:
            return msgspec.json.decode(answer.content, type=dict[str, Any])
        except BAD_JSON as error:
            raise ConfigError(f"{self.base_url}{path} answers no JSON object: {error}") from None
