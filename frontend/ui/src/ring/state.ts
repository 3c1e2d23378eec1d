// What /ring/events sends: tokenizer_proc/ring/ring_state.py and history.py. Times (`_at`) are
// seconds since the epoch; counters only grow.

export interface RingProcess {
  index: number;
  pid: number;
  state: "absent" | "starting" | "ready" | "dead";
  fault: string | null;
  served_at: number | null;
  restarts: number;
  busy_s: number;
  resident_bytes: number;
}

export interface FrontendState extends RingProcess {
  connections: number;
  open_requests: number;
  admitted: number;
  requests: number;
  queued_messages: number;
  unsent_bytes: number;
  loop_lag_s: number;
}

export interface TokenizerState extends RingProcess {
  duty: "text" | "long text" | "images" | "GET";
  queued_bytes: number;
  requests: number;
  prompt_tokens: number;
}

export interface EngineState extends RingProcess {
  waiting: number;
  waiting_tokens: number;
  running: number;
  steps: number;
  step_age_s: number | null;
  tokens_per_s: number;
  generated_tokens: number;
  computed_tokens: number;
  kv_pages: number;
  kv_pages_free: number;
  page_tokens: number;
  prefix_queries: number;
  prefix_hits: number;
  preemptions: number;
  drafts: number;
  right_drafts: number;
  state_slots: number;
  state_slots_free: number;
}

export interface WorkerState extends RingProcess {
  steps: number;
}

export interface ImageProcess extends RingProcess {
  images: number;
}

export interface DetokenizerState extends RingProcess {
  queued_steps: number;
  open_replies: number;
  tokens: number;
}

export interface InFlight {
  admitted: number;
  tokenizing: number;
  waiting: number;
  running: number;
  rendering: number;
  unsent_bytes: number;
}

export interface Death {
  role: string;
  index: number;
  pid: number;
  how: string;
  died_at: number;
  back_at: number | null;
}

export interface RingState {
  at: number;
  model: string;
  frontends: FrontendState[];
  tokenizers: TokenizerState[];
  engines: EngineState[];
  workers: WorkerState[];
  visions: ImageProcess[];
  detokenizers: DetokenizerState[];
  fetchers: ImageProcess[];
  in_flight: InFlight;
  deaths: Death[];
}

export type Column = (number | null)[];

export interface Distribution {
  bounds: number[];
  counts: number[];
}

export type Distributions = Record<string, Distribution>;

export interface HourHistory {
  interval_s: number;
  columns: Record<string, Column>;
  distributions: Distributions;
}

export interface HistoryNews {
  point: Record<string, number | null>;
  distributions: Distributions;
}
