// The turns of an episode as a list, with the paths on which a fork put them.

import { duration, number, plain, plural } from "../data/format";
import type { Turn } from "../data/types";

interface OutlineProps {
  turns: Turn[];
  current: number;
  onSelect: (index: number) => void;
}

/** How far each turn is indented: a fork, and a history that was rewritten, begin one further in. */
export function depths(turns: Turn[]): number[] {
  const place = new Map(turns.map((turn, i) => [turn.index, i]));
  const continued = new Set<number>();
  const depth: number[] = [];
  turns.forEach((turn, i) => {
    const parent = turn.parent === null || turn.parent === undefined || turn.parent < 0 ? undefined : place.get(turn.parent);
    const isFork = parent === undefined ? i > 0 : continued.has(parent);
    if (parent !== undefined) continued.add(parent);
    depth.push((parent === undefined ? 0 : (depth[parent] ?? 0)) + (isFork ? 1 : 0));
  });
  return depth;
}

export function Outline({ turns, current, onSelect }: OutlineProps) {
  const depth = depths(turns);
  return (
    <nav class="panel outline" aria-label="Turns">
      <ol>
        {turns.map((turn, i) => {
          const isFork = (depth[i] ?? 0) > 0 && (i === 0 || (depth[i - 1] ?? 0) < (depth[i] ?? 0));
          return (
            <li key={i} style={{ paddingLeft: `${Math.min(6, depth[i] ?? 0) * 14}px` }}>
              <button type="button" aria-current={i === current ? "step" : undefined} onClick={() => onSelect(i)}>
                <span class="first">
                  {isFork && (
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
