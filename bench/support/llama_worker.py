"""llama.cpp behind a pipe, run by the Python that has `llama-cpp-python`: commands in, seconds out.

Lines of JSON on standard input, each answered by one on standard output. `{"prefill": ids}`
computes a prompt. `{"decode": steps, "prompt": ids, "sequences": n}` continues n prompts greedily,
each of which is the one before it without its first token, which comes last. They are computed
untimed at first use and kept. `{"save": path, "prompt": ids}` computes a prompt and writes its
state to a file. `{"restore": path, "prompt": ids}` reads such a file and computes the rest of a
longer prompt. `{"speculate": steps, "prompt": ids, "draft": path}` continues a prompt by `steps`
tokens behind the first, drafted by a smaller model. Each kind has its own context, so a short
sequence does not pay for a long one. Between commands the process waits on its input and uses no
core.
"""

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

BATCH_TOKENS = 512  # llama.cpp's default
MOST_DRAFTS, LEAST_CHANCE = 16, 0.75  # its defaults, too
NO_LOG = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)


class Sequences:
    """A context with some sequences in it."""

    def __init__(self, model: Any, threads: int, num_sequences: int, max_tokens: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = num_sequences
        params.n_ctx = num_sequences * max_tokens
        params.n_threads = params.n_threads_batch = threads
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.num_sequences = num_sequences
        self.length = 0  # tokens of each sequence that stay
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def compute(self, rows: list[tuple[int, int, int]], num_wanted: int) -> None:
        """Run (token, position, sequence) rows; logits are wanted of the last ones."""
        for i, (token, position, sequence) in enumerate(rows):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = i >= len(rows) - num_wanted
        self.batch.n_tokens = len(rows)
        status = llama_cpp.llama_decode(self.context, self.batch)
        assert status == 0, f"llama_decode: {status}"

    def logits(self, num_rows: int) -> Any:
        """Return the logits of the last rows; waits for them."""
        pointer = llama_cpp.llama_get_logits(self.context)
        row = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(row, (num_rows, self.vocab))

    def greedy(self, num_rows: int) -> list[int]:
        """Return the likeliest token of each of the last rows; waits for them."""
        tokens: list[int] = self.logits(num_rows).argmax(axis=1).tolist()
        return tokens

    def fill(self, tokens: list[int], sequence: int, known: int = 0) -> None:
        """Compute a prompt into a sequence, in batches; logits of its last token only.

        Args:
            known: tokens of it that are there.
        """
        rows = [(token, position, sequence) for position, token in enumerate(tokens)][known:]
        for start in range(0, len(rows), BATCH_TOKENS):
            end = start + BATCH_TOKENS
            self.compute(rows[start:end], num_wanted=end >= len(rows))

    def save(self, path: str, tokens: list[int]) -> None:
        """Write the state of the only sequence, whose tokens these are, to a file."""
        ids = (llama_cpp.llama_token * len(tokens))(*tokens)
        context, name = self.context, path.encode()
        num_bytes = llama_cpp.llama_state_seq_save_file(context, name, 0, ids, len(tokens))
        assert num_bytes, f"llama.cpp cannot write {path}"

    def restore(self, path: str, max_tokens: int) -> int:
        """Read the state of the only sequence from a file; return how many tokens it has."""
        ids, count = (llama_cpp.llama_token * max_tokens)(), ctypes.c_size_t()
        context, name = self.context, path.encode()
        num_bytes = llama_cpp.llama_state_seq_load_file(
            context, name, 0, ids, max_tokens, ctypes.byref(count)
        )
        assert num_bytes, f"llama.cpp cannot read {path}"
        return count.value

    def forget(self, from_position: int) -> None:
        """Drop the tokens of every sequence from a position on."""
        memory = llama_cpp.llama_get_memory(self.context)
        for sequence in range(self.num_sequences):
            llama_cpp.llama_memory_seq_rm(memory, sequence, from_position, -1)


class Pair:
    """A text that a model continues greedily, and a smaller model drafts.

    As llama.cpp's `llama-speculative-simple`, with its defaults: a draft that is less likely than
    `LEAST_CHANCE` is not checked.
    """

    def __init__(self, model: Sequences, drafter: Sequences, prompt: list[int]) -> None:
        self._model, self._drafter = model, drafter
        for one in (model, drafter):
            one.forget(0)
            one.fill(prompt, 0)
        self._num_drafted = len(prompt)  # tokens that the drafter has computed
        self._text = [*prompt, *model.greedy(1)]

    def extend(self, most: int) -> list[int]:
        """Return the next tokens, at most so many."""
        drafts = self._drafts(min(MOST_DRAFTS, most - 1))
        checked = [self._text[-1], *drafts]
        first = len(self._text) - 1
        rows = [(token, first + place, 0) for place, token in enumerate(checked)]
        self._model.compute(rows, len(rows))
        drawn = self._model.greedy(len(rows))
        pairs = enumerate(zip(drafts, drawn, strict=False))
        num_right = next((i for i, (a, b) in pairs if a != b), len(drafts))
        told = drawn[: num_right + 1]
        self._text += told
        self._num_drafted = min(self._num_drafted, len(self._text) - 1)
        self._model.forget(len(self._text) - 1)
        self._drafter.forget(self._num_drafted)
        return told

    def _drafts(self, most: int) -> list[int]:
        drafts: list[int] = []
        waiting = self._text[self._num_drafted :]
        while len(drafts) < most:
            places = range(self._num_drafted, self._num_drafted + len(waiting))
            self._drafter.compute([(t, p, 0) for t, p in zip(waiting, places, strict=True)], 1)
            self._num_drafted += len(waiting)
            logits = self._drafter.logits(1)[0]
            token = int(logits.argmax())
            if np.exp(logits - logits[token]).sum() > 1 / LEAST_CHANCE:
                break
            drafts.append(token)
            waiting = [token]
        return drafts


class Worker:
    """The model and its contexts, by kind."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_log_set(NO_LOG, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        # With quantized weights its own AMX code dies of SIGSEGV, at the first `ldtilecfg`.
        params.use_extra_bufts = "amx_tile" not in Path("/proc/cpuinfo").read_text()
        self.params, self.models = params, {"": self.load(path, params)}
        self.threads = threads
        self.kept: dict[tuple[int, int, str], Sequences] = {}

    def load(self, path: str, params: Any) -> Any:
        """Load a model file."""
        model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        assert model, f"llama.cpp cannot load {path}"
        return model

    def sequences(self, num_sequences: int, length: int, draft: str = "") -> Sequences:
        """Return the context of a kind, of the model or of a draft model; a new one is empty."""
        key = (num_sequences, length, draft)
        if draft not in self.models:
            self.models[draft] = self.load(draft, self.params)
        if key not in self.kept:
            room = -(-(length + 128) // 256) * 256
            self.kept[key] = Sequences(self.models[draft], self.threads, num_sequences, room)
        return self.kept[key]

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        """Compute a prompt from nothing."""
        one = self.sequences(1, len(tokens))
        one.forget(0)
        start = time.perf_counter()
        one.fill(tokens, 0)
        token = one.greedy(1)
        return {"seconds": time.perf_counter() - start, "tokens": token}

    def decode(self, steps: int, prompt: list[int], num_sequences: int) -> dict[str, Any]:
        """Continue prompts by `steps` tokens each; return those of the first sequence."""
        many = self.sequences(num_sequences, len(prompt))
        kept = len(prompt) - 1  # the first step computes the prompt's last token
        prompts = [prompt[i:] + prompt[:i] for i in range(num_sequences)]
        if not many.length:
            for sequence, tokens in enumerate(prompts):
                many.fill(tokens[:-1], sequence)
            many.length = kept
        many.forget(kept)
        tokens, generated = [tokens[-1] for tokens in prompts], []
        start = time.perf_counter()
        for step in range(steps):
            rows = [(token, kept + step, sequence) for sequence, token in enumerate(tokens)]
            many.compute(rows, num_sequences)
            tokens = many.greedy(num_sequences)
            generated.append(tokens[0])
        return {"seconds": time.perf_counter() - start, "tokens": generated}

    def speculate(self, steps: int, prompt: list[int], draft: str) -> dict[str, Any]:
        """Continue a prompt by `steps` tokens behind the first, drafted by a smaller model."""
        length = len(prompt) + steps
        pair = Pair(self.sequences(1, length), self.sequences(1, length, draft), prompt)
        generated: list[int] = []
        start = time.perf_counter()
        while len(generated) < steps:
            generated += pair.extend(steps - len(generated))
        return {"seconds": time.perf_counter() - start, "tokens": generated}

    def save(self, path: str, tokens: list[int]) -> dict[str, Any]:
        """Compute a prompt from nothing, and write its state to a file."""
        answer = self.prefill(tokens)
        self.sequences(1, len(tokens)).save(path, tokens)
        return answer

    def restore(self, path: str, tokens: list[int]) -> dict[str, Any]:
        """Read the state of a prompt's beginning from a file, and compute the rest."""
        one = self.sequences(1, len(tokens))
        start = time.perf_counter()
        one.fill(tokens, 0, one.restore(path, len(tokens)))
        token = one.greedy(1)
        return {"seconds": time.perf_counter() - start, "tokens": token}


def main() -> None:
    """Serve until the input ends. Arguments: the model file, the number of threads."""
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        command = json.loads(line)
        if "prefill" in command:
            answer = worker.prefill(command["prefill"])
        elif "speculate" in command:
            answer = worker.speculate(command["speculate"], command["prompt"], command["draft"])
        elif "save" in command:
            answer = worker.save(command["save"], command["prompt"])
        elif "restore" in command:
            answer = worker.restore(command["restore"], command["prompt"])
        else:
            answer = worker.decode(command["decode"], command["prompt"], command["sequences"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
