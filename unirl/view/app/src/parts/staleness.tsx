// How old samples were when they were learned from, over time: a column for each moment, a row for each age.

import { number, percent } from "../data/format";
import { useWidth } from "../data/hooks";
import type { Staleness } from "../data/types";

const HEIGHT = 220;
const LEFT = 70;
const BOTTOM = 24;
const MAX_COLUMNS = 120;
const LEVELS = 8;

export function StalenessDrawing({ staleness, bound }: { staleness: Staleness; bound: number | null }) {
  const [frame, width] = useWidth<HTMLDivElement>();
  return (
    <div ref={frame} class="staleness">
      {!staleness.t.length || !staleness.ages.length ? (
        <p class="empty">This run does not record the ages of its samples.</p>
      ) : (
        width > 0 && <Drawing staleness={staleness} bound={bound} width={width} />
      )}
    </div>
  );
}

interface Cell {
  from: number;
  to: number;
  share: number[];
}

/** Neighbouring moments together, so that a column is wide enough to be seen. */
export function columnsOf({ t, ages, share }: Staleness, most: number): Cell[] {
  const size = Math.max(1, Math.ceil(t.length / most));
  const cells: Cell[] = [];
  for (let i = 0; i < t.length; i += size) {
    const rows = share.slice(i, i + size).filter((row) => row.some((value) => value !== null));
    if (!rows.length) continue;
    const mean = ages.map((_, age) => rows.reduce((sum, row) => sum + (row[age] ?? 0), 0) / rows.length);
    cells.push({ from: t[i] as number, to: t[Math.min(i + size, t.length) - 1] as number, share: mean });
  }
  return cells;
}

function Drawing({ staleness, bound, width }: { staleness: Staleness; bound: number | null; width: number }) {
  const { ages } = staleness;
  const cells = columnsOf(staleness, Math.min(MAX_COLUMNS, Math.floor((width - LEFT) / 5)));
  const tall = Math.max(18, Math.min(56, Math.floor(HEIGHT / ages.length)));
  const high = ages.length * tall;
  const size = (width - LEFT) / Math.max(1, cells.length);
  const newest = cells[cells.length - 1];
  const words = newest ? ages.map((age, i) => `age ${age}: ${percent(newest.share[i])}`).join(", ") : "no rows";
  return (
    <>
      <svg width={width} height={high + BOTTOM} role="img" aria-label={`Shares of samples by age over ${cells.length} moments; at the end ${words}`}>
        {ages.map((age, row) => (
          <text key={age} class="axis" x={LEFT - 8} y={high - (row + 0.5) * tall + 3} text-anchor="end">
            {age === 0 ? "age 0" : age}
          </text>
        ))}
        {cells.map((cell, column) =>
          cell.share.map((share, row) => (
            <rect
              key={`${column} ${row}`}
              class={`s${Math.round(share * LEVELS)}`}
              x={LEFT + column * size}
              y={high - (row + 1) * tall}
              width={size + 0.4}
              height={tall - 2}
            >
              <title>{`step ${number(cell.from)}: age ${ages[row]}, ${percent(share)}`}</title>
            </rect>
          )),
        )}
        <text class="axis" x={LEFT} y={high + 16}>
          step {number(staleness.t[0], 3)}
        </text>
        <text class="axis" x={width} y={high + 16} text-anchor="end">
          {number(staleness.t[staleness.t.length - 1], 3)}
        </text>
      </svg>
      <p class="note">
        <Ramp /> share of the samples. {bound === null ? "" : `At most ${number(bound)} updates old (queue.max_staleness). `}At the end: {words}.
      </p>
    </>
  );
}

function Ramp() {
  return (
    <span class="ramp">
      0 %
      {Array.from({ length: LEVELS + 1 }, (_, i) => (
        <i key={i} class={`s${i}`} />
      ))}
      100 %
    </span>
  );
}
