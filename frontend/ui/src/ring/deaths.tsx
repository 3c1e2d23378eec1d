// The processes that have died, and their successors.

import { clock } from "./figures";
import { returned } from "./nodes";
import type { Death } from "./state";

const MAX_SHOWN = 10;

export function Deaths({ deaths }: { deaths: Death[] }) {
  const newest = deaths[deaths.length - 1];
  return (
    <section aria-labelledby="deaths">
      <h2 id="deaths">Deaths and replacements</h2>
      <p class="hidden" role="status">
        {newest && `${newest.role} ${newest.index} ${newest.how}, ${returned(newest)}`}
      </p>
      {deaths.length === 0 ? (
        <p class="muted">No process has died.</p>
      ) : (
        <ol class="deaths">
          {deaths
            .slice(-MAX_SHOWN)
            .reverse()
            .map((death) => (
              <li
                key={`${death.role}${death.index}${death.died_at}`}
                class={death.back_at === null ? "gone" : ""}
              >
                <time dateTime={new Date(death.died_at * 1000).toISOString()}>
                  {clock(death.died_at)}
                </time>
                <b>
                  {death.role} {death.index}
                </b>{" "}
                {death.how}
                <span class="back">{returned(death)}</span>
              </li>
            ))}
        </ol>
      )}
    </section>
  );
}
