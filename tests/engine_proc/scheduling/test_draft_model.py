"""What the draft model has computed follows the tokens, whatever becomes of its drafts."""

from array import array

from scheduler_rig import make_sequence

from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.scheduling.draft_model import CATCH_UP_TOKENS, DraftModel
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.page_digests import chain_digests
from headrace.ipc.token_logprobs import ROW
from headrace.ipc.worker_messages import StepResult

VOCAB_SIZE = 100
PAGE_TOKENS = 4


def make(num_tokens: int, pool: PagePool) -> Sequence:
    sequence = make_sequence(list(range(num_tokens)), 50)
    sequence.pages = pool.allocate(pool.pages_for(num_tokens))
    sequence.num_computed = num_tokens - 1
    chain_digests(sequence.digests, sequence.tokens, PAGE_TOKENS, (num_tokens - 1) // PAGE_TOKENS)
    return sequence


def next_chunk(model: DraftModel, sequence: Sequence, budget: int = 512) -> Chunk:
    chunk = model.next_chunk(sequence, budget)
    assert chunk is not None
    return chunk


def draft(model: DraftModel, sequence: Sequence, *tokens: int) -> None:
    model.settle(sequence)
    for token in tokens:
        result = StepResult(array("i", [token]).tobytes(), ROW.pack(0.0, 1))
        model.take(next_chunk(model, sequence), ResultReader(result, 0))


def test_first_draft_comes_behind_all_tokens() -> None:
    pool = PagePool(16, PAGE_TOKENS)
    model, sequence = DraftModel(pool, VOCAB_SIZE), make(10, pool)
    chunk = next_chunk(model, sequence)
    assert (chunk.start, chunk.count, chunk.is_last, chunk.is_draft) == (0, 10, True, True)
    draft(model, sequence, 50, 51, 52)
    assert list(sequence.drafts) == [50, 51, 52]
    assert next_chunk(model, sequence).start == 12


def test_long_text_is_caught_up_with_in_chunks() -> None:
    pool = PagePool(200, PAGE_TOKENS)
    model, sequence = DraftModel(pool, VOCAB_SIZE), make(CATCH_UP_TOKENS + 5, pool)
    chunk = next_chunk(model, sequence)
    assert (chunk.count, chunk.is_last) == (CATCH_UP_TOKENS, False)
    model.take(chunk, ResultReader(StepResult(b""), 0))
    assert not sequence.drafts
    assert next_chunk(model, sequence).count == 5


def test_accepted_drafts_are_not_computed_again() -> None:
    pool = PagePool(16, PAGE_TOKENS)
    model, sequence = DraftModel(pool, VOCAB_SIZE), make(10, pool)
    for told, behind in (([50, 51, 60], 1), ([50, 51, 52, 60], 2), ([60], 1)):
        num_before = len(sequence.tokens)
        draft(model, sequence, 50, 51, 52)
        sequence.tokens.extend(told)
        model.settle(sequence)
        assert model.num_behind(sequence) == behind, told
        assert not sequence.drafts
        del sequence.tokens[num_before:]
        sequence.drop_drafts()


def test_page_of_the_same_tokens_is_not_computed_again() -> None:
    pool = PagePool(16, PAGE_TOKENS)
    model, first = DraftModel(pool, VOCAB_SIZE), make(10, pool)
    draft(model, first, 50)
    second = make(10, pool)
    second.pages[:2] = first.pages[:2]
    model.settle(second)
    assert second.num_drafted == 8
    other = make(10, pool)
    model.settle(other)
    assert other.num_drafted == 0


def test_lost_or_rewritten_page_is_computed_again() -> None:
    pool = PagePool(16, PAGE_TOKENS)
    model, first = DraftModel(pool, VOCAB_SIZE), make(10, pool)
    draft(model, first, 50)
    second = make(6, pool)
    second.pages[:] = first.pages[1:]
    second.digests.clear()
    draft(model, second, 50)
    third = make(10, pool)
    third.pages[:2] = first.pages[:2]
    model.settle(third)
    assert third.num_drafted == PAGE_TOKENS
    model.lose_pages()
    third.drop_drafts()
    model.settle(third)
    assert third.num_drafted == 0


def test_token_beyond_the_vocabulary_is_no_draft() -> None:
    pool = PagePool(16, PAGE_TOKENS)
    model, sequence = DraftModel(pool, VOCAB_SIZE), make(10, pool)
    draft(model, sequence, VOCAB_SIZE)
    assert not sequence.drafts


def test_no_page_no_draft() -> None:
    pool = PagePool(3, PAGE_TOKENS)
    model, sequence = DraftModel(pool, VOCAB_SIZE), make(12, pool)
    draft(model, sequence, 50)
    assert model.next_chunk(sequence, 512) is None


def test_draft_model_in_the_model_s_pages_is_never_behind() -> None:
    pool = PagePool(16, PAGE_TOKENS)
    model, sequence = DraftModel(pool, VOCAB_SIZE, has_pages=False), make(10, pool)
    model.settle(sequence)
    assert model.num_behind(sequence) == 1
    draft(model, sequence, 50, 51)
    assert list(sequence.drafts) == [50, 51]


def test_layer_of_the_model_computes_accepted_drafts_again() -> None:
    pool = PagePool(16, PAGE_TOKENS)
    model, sequence = DraftModel(pool, VOCAB_SIZE, from_hidden=True), make(10, pool)
    chunk = next_chunk(model, sequence)
    assert (chunk.start, chunk.count, chunk.is_last) == (1, 9, True)
    draft(model, sequence, 50, 51, 52)
    assert next_chunk(model, sequence).start == 12
    sequence.tokens.extend([50, 51, 60])
    model.settle(sequence)
    chunk = next_chunk(model, sequence)
    assert (chunk.start, chunk.count, chunk.is_last) == (10, 3, True)


def test_layer_of_the_model_writes_to_no_page_that_others_share() -> None:
    pool = PagePool(16, PAGE_TOKENS)
    model, first = DraftModel(pool, VOCAB_SIZE, from_hidden=True), make(10, pool)
    draft(model, first, 50)
    second = make(10, pool)
    second.pages[:2] = first.pages[:2]
    model.settle(second)
    chunk = next_chunk(model, second)
    assert (chunk.start, chunk.count) == (9, 1)
    assert chunk.start - 1 >= 2 * PAGE_TOKENS, "a token's keys lie one position before it"


def test_layer_of_the_model_completes_a_page_by_the_next_token() -> None:
    pool = PagePool(16, PAGE_TOKENS)
    model, first = DraftModel(pool, VOCAB_SIZE, from_hidden=True), make(8, pool)
    draft(model, first, 50)
    second = make(10, pool)
    second.pages[:2] = first.pages[:2]
    model.settle(second)
    assert next_chunk(model, second).start == PAGE_TOKENS + 1
