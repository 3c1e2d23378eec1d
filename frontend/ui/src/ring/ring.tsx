// The processes of the server as the ring they are, live.

import { useEffect } from "preact/hooks";

import { Deaths } from "./deaths";
import { RingDrawing } from "./drawing";
import { bytes, count, duration, hitRate, kvUsage, percent, rate, sum } from "./figures";
import { Histogram } from "./histogram";
import { groupsOf } from "./nodes";
import { Plot, type PlotOf } from "./plot";
import { ProcessTable } from "./process_table";
import type { HourHistory, RingState } from "./state";
import { follow, hour, refusal, states } from "./stream";

const PLOTS: PlotOf[] = [
  {
    title: "Tokens per second",
    series: [
      { column: "generated_tokens_per_s", label: "generated" },
      { column: "computed_tokens_per_s", label: "computed" },
    ],
    format: count,
  },
  {
    title: "Sequences",
    series: [
      { column: "running", label: "running" },
      { column: "waiting", label: "waiting" },
    ],
    format: count,
  },
  {
    title: "Caches",
    series: [
      { column: "kv_usage", label: "KV use" },
      { column: "prefix_hit_rate", label: "prefix hits" },
    ],
    format: percent,
    max: 1,
  },
  ...[
    ["Time to first token", "time_to_first_token"],
    ["Inter-token latency", "inter_token_latency"],
    ["Whole response", "e2e_latency"],
  ].map(([title, name]) => ({
    title: title!,
    series: [
      { column: `${name}_p50_s`, label: "median" },
      { column: `${name}_p99_s`, label: "99th percentile" },
    ],
    format: duration,
  })),
  {
    title: "Event loop lag",
    series: [{ column: "loop_lag_p99_s", label: "99th percentile" }],
    format: duration,
  },
];

const HISTOGRAMS = [
  ["time_to_first_token", "Time to first token"],
  ["inter_token_latency", "Inter-token latency"],
  ["e2e_latency", "Whole response"],
] as const;

export function Ring() {
  useEffect(follow, []);
  const now = states.value[states.value.length - 1];
  return (
    <section class="page ring-page">
      <h1>Ring</h1>
      {refusal.value && <p class="wrong">{refusal.value}</p>}
      {now ? <Live now={now} /> : <p class="muted">Waiting for the first figures.</p>}
      {hour.value && <LastHour hour={hour.value} />}
    </section>
  );
}

function Live({ now }: { now: RingState }) {
  const groups = groupsOf(states.value);
  const speeds = now.engines.map(({ index }) =>
    rate(
      states.value,
      (state) => state.engines[index],
      (engine) => engine.generated_tokens,
    ),
  );
  const tokensPerS = speeds.every((one) => one === null) ? null : sum(speeds, (one) => one ?? 0);
  return (
    <>
      <Figures now={now} tokensPerS={tokensPerS} />
      <RingDrawing groups={groups} tokensPerS={tokensPerS} running={now.in_flight.running} />
      <ProcessTable state={now} groups={groups} />
      <Deaths deaths={now.deaths} />
    </>
  );
}

// Requests in flight by the hop they are at, and what there is one figure of.
function Figures({ now, tokensPerS }: { now: RingState; tokensPerS: number | null }) {
  const flight = now.in_flight;
  const lag = Math.max(...now.frontends.map((one) => one.loop_lag_s), 0);
  const figures = [
    ["In flight", count(flight.admitted), "requests"],
    ["Tokenizing", count(flight.tokenizing), "requests"],
    ["Waiting", count(flight.waiting), "sequences"],
    ["Running", count(flight.running), "sequences"],
    ["Rendering", count(flight.rendering), "replies"],
    ["Unsent", bytes(flight.unsent_bytes), "to clients"],
    ["Speed", count(tokensPerS), "tokens/s"],
    ["KV cache", percent(kvUsage(now.engines)), "in use"],
    ["Prefix cache", percent(hitRate(states.value)), "hits"],
    ["Loop lag", duration(lag), "of frontends"],
  ];
  return (
    <dl class="flight">
      {figures.map(([name, value, unit]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>
            <b>{value}</b> <span>{unit}</span>
          </dd>
        </div>
      ))}
    </dl>
  );
}

function LastHour({ hour }: { hour: HourHistory }) {
  return (
    <section aria-labelledby="hour">
      <h2 id="hour">The last hour</h2>
      <div class="plots">
        {PLOTS.map((plot) => (
          <Plot key={plot.title} plot={plot} hour={hour} />
        ))}
        {HISTOGRAMS.map(([name, title]) => (
          <Histogram
            key={name}
            title={`${title}: distribution`}
            distribution={hour.distributions[name]!}
          />
        ))}
      </div>
    </section>
  );
}
