"""The fields of a slot: an enum per role, whose values are numbers of words.

Words are numbered in the order of definition: those that all roles have first, a role's own after
them. A definition is a kind and, for a field of several words, their number:

    WISHES = COUNTER, 7
"""

import enum

FIELD_WORDS = 104  # of a slot, for fields
MAX_TOKENIZERS = 16  # beside the one for long prompts
MAX_PREPROCESSORS = 8  # beside both and the one for GETs, for images
MAX_REPLICAS = 16  # engines
MAX_MODELS = MAX_REPLICAS  # each has an engine, or waits for a seat


class Seating(enum.IntEnum):
    """Whether an engine has its seat: `EngineField.SEATING`."""

    SEATED = 0  # requests go to it
    LEAVING = 1  # it ends those it has
    VACANT = 2  # nothing goes to it


class Kind(enum.Enum):
    """Behavior of a field at a restart, and whether a change counts as progress."""

    COUNTER = enum.auto()  # only grows; survives a restart
    KEPT = enum.auto()  # any value; survives a restart
    GAUGE = enum.auto()  # any value; a restart resets it to 0
    TIMER_GAUGE = enum.auto()  # a gauge that a timer writes: its change is no work


COUNTER, KEPT, GAUGE, TIMER_GAUGE = Kind


class BoardField(enum.IntEnum):
    """A field's value is its first word.

    Raises:
        ValueError: the fields of a role exceed `FIELD_WORDS`.
    """

    kind: Kind
    num_words: int

    def __new__(cls, kind: Kind, num_words: int = 1) -> "BoardField":
        """Place a field behind those that are defined before it."""
        start = cls.first_word() + sum(field.num_words for field in cls.__members__.values())
        if start + num_words > FIELD_WORDS:
            raise ValueError(f"{cls.__name__} needs word {start + num_words - 1} of {FIELD_WORDS}")
        field = int.__new__(cls, start)
        field._value_ = start
        field.kind = kind
        field.num_words = num_words
        return field

    @classmethod
    def first_word(cls) -> int:
        """Return where a role's own fields begin: behind the common ones."""
        return sum(field.num_words for field in CommonField)

    @property
    def words(self) -> range:
        """The words of this field."""
        return range(self, self + self.num_words)

    @property
    def role(self) -> str:
        """The role that has this field. A common field has none: `KeyError`."""
        return ROLES[type(self)]

    @property
    def is_gauge(self) -> bool:
        """Whether a restart resets the field."""
        return self.kind in (GAUGE, TIMER_GAUGE)


class CommonField(BoardField):
    """Fields of every role. None of them counts as progress."""

    PID = KEPT
    STATE = KEPT
    HEARTBEAT_NS = KEPT  # CLOCK_MONOTONIC
    PROGRESS = GAUGE  # per mille of start-up work done
    STARTS = COUNTER  # of processes in this seat
    STACKS_FD = KEPT  # the process's own descriptor of its `StackFile`
    HARMED_PID = KEPT  # the process that --chaos has sent a signal; the supervisor writes it
    DEATHS = COUNTER  # of processes that may have had requests; the supervisor counts

    @classmethod
    def first_word(cls) -> int:
        """Return where the common fields begin."""
        return 0


class FrontendField(BoardField):
    """Fields of a frontend."""

    REQUESTS = COUNTER
    RESPONSES = COUNTER
    DISCONNECTS = COUNTER
    OPEN_REQUESTS = GAUGE
    ADMITTED = GAUGE  # requests that take a place: their body has come, the response is incomplete
    BYTES_IN = COUNTER
    BYTES_OUT = COUNTER
    HELD_BYTES = GAUGE  # of bodies being read
    KEPT_BYTES = GAUGE  # of bodies read whose responses are incomplete
    UNSENT_BYTES = GAUGE  # of responses whose clients read too slowly
    CONNECTIONS = GAUGE
    IS_CLOSED = GAUGE  # 1: the server stops and takes no requests
    OVERLOADS = COUNTER  # requests rejected for overload,
    REQUEST_OVERLOADS = COUNTER  # of which for too many requests,
    TOKEN_OVERLOADS = COUNTER  # or too many waiting tokens
    UNAUTHORIZED = COUNTER
    PARTINGS = COUNTER  # connections refused or ended: too many, too slow, or not HTTP
    MESSAGES_TAKEN = COUNTER  # of `MESSAGES_SENT` to it, those handled
    ANSWERED = COUNTER  # all requests, those for `/health` too
    LONGEST_CALLBACK_NS = COUNTER  # of CPU time, on the event loop, so far
    LAG_NS = TIMER_GAUGE  # of the event loop's last timer
    LOST_REPORTS = COUNTER  # reports that the telemetry process did not get
    IS_LEAVING = GAUGE  # 1: another process takes the seat once open requests are answered
    FORWARDED = COUNTER  # requests sent to tokenizers, but GETs
    WISHES = COUNTER, 10  # admin requests, by `WISHES`
    REPLICAS = KEPT, MAX_REPLICAS  # that operators want, by model: `replicas.py` has the format,
    SLEEPS = KEPT, MAX_REPLICAS  # and whether its engines are to sleep, in the same format
    # Of bodies, by tokenizer: those for all prompts, for long ones, for images, for GETs.
    FORWARDED_BYTES = COUNTER, MAX_TOKENIZERS + 1 + MAX_PREPROCESSORS + 1


class TokenizerField(BoardField):
    """Fields of a tokenizer."""

    HANDLED = COUNTER
    REFUSED = COUNTER
    ABANDONED = COUNTER  # of HANDLED, those whose clients had left
    PROMPT_TOKENS = COUNTER
    HANDLED_BYTES = COUNTER  # of `FrontendField.FORWARDED_BYTES`
    AT_HAND = KEPT  # the suspect request in progress, or 0
    IMAGES = COUNTER  # looked up in the arena,
    FOUND_IMAGES = COUNTER  # and found: prepared for an earlier request
    IMAGE_BYTES = GAUGE  # of prepared images in the arena,
    SENT_IMAGE_BYTES = GAUGE  # and of those that the engine still needs
    SENT_TOKENS = COUNTER, MAX_REPLICAS  # of prompts, by engine
    # Where the model has replicas: requests that went to the engine with most of their prompt,
    PREFIX_ROUTED = COUNTER
    LOAD_ROUTED = COUNTER  # to the one with the least to compute,
    RESUME_ROUTED = COUNTER  # back to their own after another process's death,
    ROUTED_CACHED_TOKENS = COUNTER  # and the tokens of prompts that the chosen engines had
    WAITING = GAUGE, MAX_REPLICAS  # sequences that wait for an engine, by model


class EngineField(BoardField):
    """Fields of the engine."""

    STEPS = COUNTER
    STEPS_AHEAD = COUNTER  # of STEPS, those sent while another was computed
    STEPPED_NS = GAUGE  # CLOCK_MONOTONIC, of the last step's end
    STEP_DUE_NS = GAUGE  # CLOCK_MONOTONIC, when the oldest open step is overdue; 0 is never
    RUNNING = GAUGE
    WAITING = GAUGE
    WAITING_TOKENS = GAUGE  # to compute for waiting sequences
    PAGES_TOTAL = GAUGE
    PAGES_FREE = GAUGE
    PAGE_TOKENS = GAUGE  # that a page of the KV cache holds
    COMPUTED_TOKENS = COUNTER
    GENERATED_TOKENS = COUNTER
    TOKENS_PER_SECOND = GAUGE  # generated lately
    PREEMPTIONS = COUNTER
    ABORTED = COUNTER
    FINISHED = COUNTER
    ENDED = COUNTER, 2  # sequences run to their end, by `FinishReason`
    LAPSED = COUNTER  # requests aborted since no frontend renewed them
    QUEUE_REFUSALS = COUNTER
    PREFIX_QUERIES = COUNTER  # tokens looked up in the prefix cache,
    PREFIX_HITS = COUNTER  # and those found
    PREFILLED_TOKENS = COUNTER  # of prompts that have a first token, those computed,
    CACHED_TOKENS = COUNTER  # and those found in the prefix cache
    DRAFT_ROUNDS = COUNTER  # steps of sequences with drafts
    DRAFTS = COUNTER  # tokens,
    RIGHT_DRAFTS = COUNTER  # and those accepted,
    RIGHT_AT = COUNTER, 15  # by place in the draft
    EMBEDDING_QUERIES = COUNTER  # images looked up in the encoder cache,
    EMBEDDING_HITS = COUNTER  # and those found
    WAITING_IMAGES = GAUGE  # to be encoded, or in progress
    EMBEDDING_ROWS = GAUGE  # of the embedding area,
    EMBEDDING_ROWS_FREE = GAUGE  # and those that no sequence needs
    STATES_TOTAL = GAUGE  # state slots,
    STATES_FREE = GAUGE  # and those that no sequence and no step uses
    RECOVERED_PAGES = COUNTER  # full pages that a death of workers or engine has left
    TAKEN_TOKENS = COUNTER  # of `TokenizerField.SENT_TOKENS`, those that have come
    PENDING_TOKENS = GAUGE  # to compute for all sequences; where the model has replicas
    IS_BUSY = GAUGE  # 1: it has requests, in whatever state, or outputs that are not sent
    MODEL = KEPT  # place of its model among the server's; the supervisor writes it,
    SEATING = KEPT  # a `Seating`,
    SEATINGS = KEPT  # of the first engine's slot: how often the seats of all have changed
    IS_SPARE = KEPT  # 1 of a seat that is vacant when the server starts,
    IS_REMOTE = KEPT  # 1 where it runs on another machine,
    IS_PLACED = KEPT  # and 1 where Ray places it there
    LOADS = COUNTER  # how often its model was loaded by this engine,
    FAILED_LOADS = COUNTER  # and how often it could not be;
    RETRY_NS = KEPT  # CLOCK_MONOTONIC, before which that is not tried again
    CAN_SLEEP = GAUGE  # 1 of one whose pages the system takes back while workers live,
    IS_ASLEEP = GAUGE  # and 1 while it has given them back, and has no requests
    KERNELS = GAUGE  # a `kernels_number`: of what decides about its bits
    SESSION = GAUGE  # of the seat with an engine on another machine, while that serves,
    LOST_SESSION = GAUGE  # and the one that ends; the process writes it whose link has broken
    LOAD_SIZE = KEPT  # of a model's first engine: how many it gets; the supervisor writes it
    PREFILL_RATE = GAUGE  # tokens per second of steps with prompts; 0 before the first


class WorkerField(BoardField):
    """Fields of a worker."""

    COMPUTED_STEPS = COUNTER
    ENGINE = KEPT  # index of its engine; the supervisor writes it
    ADAPTER_BYTES = KEPT  # of a CPU's memory, that adapters of all its engine's workers may take


class VisionField(BoardField):
    """Fields of the vision worker."""

    ENCODED_IMAGES = COUNTER
    ENCODER_BATCHES = COUNTER  # calls of the tower for them
    STORE_HITS = COUNTER  # images whose embeddings the KV store had


class KvStoreField(BoardField):
    """Fields of the KV store. Those of two words are of the tiers: memory, disk.

    On GPUs memory is their host tier, of which the engine writes.
    """

    FOUND = COUNTER, 2  # records fetched; those that GPUs got from their host tier
    NOT_FOUND = COUNTER  # records that were asked for and were not there, or not right
    FETCHED_BYTES = COUNTER
    FETCH_NS = COUNTER  # spent on fetches
    STORED = COUNTER  # records
    STORED_BYTES = COUNTER
    REFUSED = COUNTER, 2  # records whose checksum was wrong
    FAILED_WRITES = COUNTER, 2
    USED_BYTES = GAUGE, 2  # of this server's records,
    TOTAL_BYTES = GAUGE, 2  # and the room for them
    COPIED_OUT = COUNTER  # records copied from GPUs to their host tier; the engine writes it,
    COPY_IN_NS = COUNTER  # and what copies back have taken


class FetcherField(BoardField):
    """Fields of the fetcher."""

    FETCHED_IMAGES = COUNTER
    FETCH_REFUSALS = COUNTER
    AT_HAND = KEPT  # the suspect request in progress, or 0


class StageField(BoardField):
    """Fields of the process that has a stage's worker for another machine."""

    SENT_ON = COUNTER  # messages to the worker,
    FRAMES = COUNTER  # and hidden states for it


class PlacementField(BoardField):
    """Fields of the placement process."""

    PLACED = GAUGE  # engines on nodes


class TelemetryField(BoardField):
    """Fields of the telemetry process."""

    TAKEN = COUNTER  # reports handled


class DetokenizerField(BoardField):
    """Fields of a detokenizer."""

    TOKENS = COUNTER
    MESSAGES_TAKEN = COUNTER  # of `MESSAGES_SENT` to it, those handled
    FRAMES = COUNTER
    OPEN_RESPONSES = GAUGE
    TOOL_READINGS = COUNTER, 12  # by the labels of `tool_calls.py`
    RESPONSE_AT_HAND = KEPT  # the request whose response is being written, or 0,
    LAST_RESPONSE_AT_HAND = KEPT  # and that of the process before, when it died


FIELDS: dict[str, type[BoardField]] = {
    "frontend": FrontendField,
    "tokenizer": TokenizerField,
    "engine": EngineField,
    "worker": WorkerField,
    "vision": VisionField,
    "kv_store": KvStoreField,
    "fetcher": FetcherField,
    "detokenizer": DetokenizerField,
    "stage": StageField,
    "placement": PlacementField,
    "telemetry": TelemetryField,
}
ROLES = {fields: role for role, fields in FIELDS.items()}
