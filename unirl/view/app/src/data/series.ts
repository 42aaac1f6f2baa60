// Curves: several runs as one with a band, values at a place, and what a curve says in words.

import { number } from "./format";
import type { Series, Value } from "./types";

const GRID = 400;

export interface Line {
  label: string;
  series: Series;
  /** Which of the palette's colours. */
  colour: number;
  /** Drawn in front, and wider. */
  strong?: boolean;
}

/** The value at a place, between two rows; null outside of the rows and in gaps. */
export function at(series: Series, place: number, start = 0): [Value, number] {
  const { t, v } = series;
  let i = start;
  while (i < t.length && (t[i] as number) < place) i++;
  if (i >= t.length) return [null, i];
  const after = v[i] ?? null;
  if (t[i] === place) return [after, i];
  const before = i > 0 ? (v[i - 1] ?? null) : null;
  if (before === null || after === null) return [null, i];
  const [a, b] = [t[i - 1] as number, t[i] as number];
  return [before + ((after - before) * (place - a)) / (b - a), i];
}

/** Mean of several runs, with the lowest and the highest; where at least half of them have values. */
export function combine(all: Series[]): Series {
  const runs = all.map(withoutGaps).filter((one) => one.t.length > 0);
  const low = Math.min(...runs.map((one) => one.t[0] as number));
  const high = Math.max(...runs.map((one) => one.t[one.t.length - 1] as number));
  const answer: Required<Series> = { t: [], v: [], low: [], high: [] };
  if (!runs.length) return answer;
  const places = runs.map(() => 0);
  for (let step = 0; step <= GRID; step++) {
    const place = low + ((high - low) * step) / GRID;
    const values: number[] = [];
    runs.forEach((run, i) => {
      const [value, found] = at(run, place, places[i]);
      places[i] = found;
      if (value !== null) values.push(value);
    });
    if (values.length === 0 || values.length < runs.length / 2) continue;
    answer.t.push(place);
    answer.v.push(values.reduce((sum, value) => sum + value, 0) / values.length);
    answer.low.push(Math.min(...values));
    answer.high.push(Math.max(...values));
    if (high === low) break;
  }
  return answer;
}

/** A metric that a row lacks, as evaluations are in most, is drawn through. */
export function withoutGaps(series: Series): Series {
  if (series.v.every((value) => value !== null)) return series;
  const kept = series.v.flatMap((value, i) => (value === null ? [] : [i]));
  const pick = <V>(values: V[] | undefined) => values && kept.map((i) => values[i] as V);
  const answer: Series = { t: pick(series.t) as number[], v: pick(series.v) as Value[] };
  const [low, high] = [pick(series.low), pick(series.high)];
  return low && high ? { ...answer, low, high } : answer;
}

export function last(series: Series | undefined): Value {
  for (let i = (series?.v.length ?? 0) - 1; i >= 0; i--) {
    const value = series?.v[i];
    if (value !== null && value !== undefined) return value;
  }
  return null;
}

export function inWords(line: Line): string {
  const values = line.series.v.filter((value): value is number => value !== null);
  if (!values.length) return `${line.label}: no values`;
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return `${line.label}: first ${number(values[0])}, last ${number(values[values.length - 1])}, lowest ${number(low)}, highest ${number(high)}`;
}
