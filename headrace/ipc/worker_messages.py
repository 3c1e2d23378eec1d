"""Messages between the engine and its workers, in shared memory: steps and results."""

import struct

from headrace.ipc.messages import Message

ITEM_BYTES = 4  # of the columns of a `Step`


class Step(Message, tag="step", frozen=True):
    """The batch of one step: engine -> every worker. Arrays are little-endian.

    The first five fields are those of `executor.Batch`. `rows` has a `SAMPLING_ROW` for each of
    `logit_rows`, which points into `history`, the tokens penalties look at, and into the biases.
    """

    token_ids: bytes  # i32
    positions: bytes  # i32
    sequences: bytes  # i32
    page_table: bytes  # i32, row-major
    logit_rows: bytes  # i32
    rows: bytes
    history: bytes = b""  # i32; -1 - r is the token that row r of the step before draws
    bias_tokens: bytes = b""  # i32
    bias: bytes = b""  # f32, added to those tokens' logits; minus infinity bans
    pooled_rows: bytes = b""  # i32, the last token of each sequence whose embedding is wanted
    token_types: bytes = b""  # i32, 1 in the second of two texts; empty where no sequence has two
    masked_rows: bytes = b""  # i32, the logit rows in which a grammar allows some tokens only
    # Of images, by token; empty where no token of the step needs it.
    embed_rows: bytes = b""  # i32, the row of the embedding area it comes in as; -1 is none
    rope_positions: bytes = b""  # i32, three of each: time, height, width
    last_seen: bytes = b""  # i32, the last position it sees, which is in the step, too
    # i32, by token: the logit row of the step before this one whose drawn token takes its place, or
    # -1; empty where all tokens are known. So a step can be sent while the one before it is run.
    token_sources: bytes = b""

    @property
    def num_tokens(self) -> int:
        """How many it computes."""
        return len(self.token_ids) // ITEM_BYTES


class Masks(Message, tag="masks", frozen=True):
    """The masks of the last step's `masked_rows` are in shared memory: engine -> every worker.

    They are made while the step is computed. See `grammar_bitmask.py`.
    """


class Resume(Message, tag="resume", frozen=True):
    """A step has failed; those sent after this are to be run again: engine -> every worker."""


# How one row is sampled. Its noise is a function of seed and position, the new token's, so batch
# mates never change a result.
#   u64 seed, position
#   f32 temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty
#   i32 top_k
#   i32 num_logprobs                             likeliest tokens to report; -1 is no logprobs
#   i32 target                                   not sampled, this token is only looked at; or -1
#   i32 history_start, num_prompt, num_history   the first num_prompt are the prompt's
#   i32 bias_start, num_bias
SAMPLING_ROW = struct.Struct("<2Q6f8i")


class StepResult(Message, tag="result", frozen=True):
    """The result of a step: worker 0 -> engine.

    `logprobs` has an entry for each row that wants them: f32 logprob and i32 rank of the row's
    token, then num_logprobs pairs of i32 token and f32 logprob, best first.
    """

    token_ids: bytes  # i32, one per logit row; a target's row has the target
    logprobs: bytes = b""
    embeddings: bytes = b""  # f32, one vector per pooled row


class StepFailed(Message, tag="failed", frozen=True):
    """There was no memory for a step: worker -> engine, for it and all that are sent after it.

    Nothing of it counts. It works on all workers or on none: one failure is everybody's.
    """

    why: str


class WorkerReady(Message, tag="ready", frozen=True):
    """The worker has loaded its weights and mapped its pages: worker 0 -> engine, once."""

    num_pages: int
    page_tokens: int
    whole_prompts: bool = False  # an encoder: all tokens of a text see each other, in one step
    looks_ahead: bool = False  # a step had better be sent while the one before it is computed


ToWorker = Step | Masks | Resume
FromWorker = StepResult | StepFailed | WorkerReady
