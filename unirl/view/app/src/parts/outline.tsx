// The turns of an episode as a list, with the paths on which a fork put them.

import { duration, number, plain, plural } from "../data/format";
import type { Turn } from "../data/types";

interface OutlineProps {
  turns: Turn[];
  current: number;
  onSelect: (index: number) => void;
}

interface Place {
  /** How far it is indented. */
  depth: number;
  /** Whether another path begins with it: a fork, or a history that was rewritten. */
  begins: boolean;
}

export function placesOf(turns: Turn[]): Place[] {
  const known = new Map(turns.map((turn, i) => [turn.index, i]));
  const continued = new Set<number>();
  const places: Place[] = [];
  turns.forEach((turn, i) => {
    const parent = typeof turn.parent === "number" ? known.get(turn.parent) : undefined;
    const begins = parent === undefined ? i > 0 : continued.has(parent);
    if (parent !== undefined) continued.add(parent);
    places.push({ depth: (parent === undefined ? 0 : (places[parent]?.depth ?? 0)) + Number(begins), begins });
  });
  return places;
}

export function Outline({ turns, current, onSelect }: OutlineProps) {
  const places = placesOf(turns);
  return (
    <nav class="panel outline" aria-label="Turns">
      <ol>
        {turns.map((turn, i) => {
          const { depth = 0, begins = false } = places[i] ?? {};
          return (
            <li key={i} style={{ paddingLeft: `${Math.min(6, depth) * 14}px` }}>
              <button type="button" aria-current={i === current ? "step" : undefined} onClick={() => onSelect(i)}>
                <span class="first">
                  {begins && (
                    <span class="fork" role="img" aria-label="fork: another path begins">
                      ↳{" "}
                    </span>
                  )}
                  {i + 1} {turn.tool ? `calls ${plain(turn.tool)}` : turn.role ? plain(turn.role) : ""}
                  {turn.ok === false && <span class="bad"> failed</span>}
                </span>
                <span class="muted">
                  {[
                    turn.num_drawn ? plural(turn.num_drawn, "token") : "",
                    typeof turn.reward === "number" ? `reward ${number(turn.reward)}` : "",
                    typeof turn.seconds_model === "number" ? duration(turn.seconds_model + (turn.seconds_tool ?? 0)) : "",
                  ]
                    .filter(Boolean)
                    .join(" · ")}
                </span>
              </button>
            </li>
          );
        })}
      </ol>
    </nav>
  );
}
