// A chart of lines with bands and marks: uPlot draws, the legend is text, keys and pointer move the same cursor.

import { useEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import { duration, number } from "../data/format";
import { useMedia, useWidth } from "../data/hooks";
import { inWords, last, type Line, withoutGaps } from "../data/series";
import type { Axis } from "../data/types";
import { type Mark, marksPlugin } from "./marks";

interface ChartProps {
  title: string;
  lines: Line[];
  axis: Axis;
  marks?: Mark[];
  height?: number;
  /** Charts of the same name move their cursors together. */
  sync?: string;
  small?: boolean;
}

const MAX_LEGEND = 24;

export function Chart({ title, lines, axis, marks = [], height = 260, sync, small }: ChartProps) {
  const [frame, width] = useWidth<HTMLDivElement>();
  const dark = useMedia("(prefers-color-scheme: dark)");
  const plot = useRef<uPlot | null>(null);
  const values = useRef<(HTMLElement | null)[]>([]);
  const spoken = useRef<HTMLDivElement>(null);
  const newestMarks = useRef(marks);
  newestMarks.current = marks;
  const drawn = useMemo(() => lines.map((line) => ({ ...line, series: withoutGaps(line.series) })), [lines]);
  const newest = useRef(drawn);
  newest.current = drawn;
  const shape = drawn.map((line) => [line.label, line.colour, line.strong, !!line.series.low]);
  const structure = JSON.stringify([shape, axis, dark, height, sync, small, width > 0]);

  useEffect(() => {
    if (!frame.current || !width || !drawn.some((line) => line.series.t.length)) return;
    const own = new uPlot(
      options(newest.current, { axis, width, height, sync, small, marks: newestMarks, show: (index) => showValues(index) }),
      align(newest.current),
      frame.current,
    );
    plot.current = own;
    return () => {
      own.destroy();
      plot.current = null;
    };
  }, [structure, drawn.some((line) => line.series.t.length)]);

  useEffect(() => {
    if (width) plot.current?.setSize({ width, height });
  }, [width, height]);

  useEffect(() => {
    const own = plot.current;
    if (!own) return;
    const { min, max } = own.scales.x as uPlot.Scale;
    const times = own.data[0];
    const isEnlarged = typeof min === "number" && typeof max === "number" && (min > (times[0] as number) || max < (times[times.length - 1] as number));
    own.setData(align(drawn), !isEnlarged);
    if (isEnlarged) own.redraw();
  }, [drawn, marks]);

  function showValues(index: number | null): void {
    const own = plot.current;
    newest.current.forEach((line, i) => {
      const element = values.current[i];
      if (!element) return;
      const value = index === null || !own ? last(line.series) : own.data[1 + 3 * i]?.[index];
      element.textContent = typeof value === "number" ? number(value) : "–";
    });
  }

  function onKey(event: KeyboardEvent): void {
    const own = plot.current;
    if (!own || event.ctrlKey || event.metaKey || event.altKey) return;
    const times = own.data[0];
    const step = event.shiftKey ? 10 : 1;
    const from = own.cursor.idx ?? times.length - 1;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const index = Math.min(times.length - 1, Math.max(0, from + (event.key === "ArrowLeft" ? -step : step)));
      own.setCursor({ left: own.valToPos(times[index] as number, "x"), top: 0 });
      const texts = newest.current.slice(0, 4).map((line, i) => `${line.label} ${number(own.data[1 + 3 * i]?.[index])}`);
      if (spoken.current) spoken.current.textContent = `${place(times[index] as number, axis)}: ${texts.join(", ")}`;
    } else if (event.key === "+" || event.key === "-") {
      const { min, max } = own.scales.x as { min: number; max: number };
      const centre = times[from] as number;
      const half = ((max - min) / 2) * (event.key === "+" ? 0.5 : 2);
      own.setScale("x", { min: Math.max(times[0] as number, centre - half), max: Math.min(times[times.length - 1] as number, centre + half) });
    } else if (event.key === "Escape") {
      own.setData(own.data);
    } else return;
    event.preventDefault();
  }

  const isEmpty = !drawn.some((line) => line.series.t.length);
  return (
    <figure class={small ? "chart small" : "chart"}>
      <figcaption>{title}</figcaption>
      <div
        ref={frame}
        class="plot"
        style={{ minHeight: `${isEmpty ? 80 : height}px` }}
        tabIndex={isEmpty ? -1 : 0}
        role="img"
        aria-label={`Chart: ${title} by ${axis}. ${drawn.slice(0, 8).map(inWords).join(". ")}`}
        title={small ? undefined : "Drag to enlarge, double click for all; keys: arrows, + and -, Esc"}
        onKeyDown={onKey}
      >
        {isEmpty && <p class="empty">No rows yet</p>}
      </div>
      <div class="hidden" aria-live="polite" ref={spoken} />
      <ul class="legend">
        {drawn.slice(0, MAX_LEGEND).map((line, i) => (
          <li key={line.label}>
            <span class={`swatch c${line.colour}`} />
            <span class="name">{line.label}</span>
            <span
              class="value"
              ref={(element) => {
                values.current[i] = element;
              }}
            >
              {number(last(line.series))}
            </span>
          </li>
        ))}
        {drawn.length > MAX_LEGEND && <li>and {drawn.length - MAX_LEGEND} more</li>}
      </ul>
    </figure>
  );
}

/** One column of places for all lines; each line's value, lowest and highest. */
function align(lines: Line[]): uPlot.AlignedData {
  const tables = lines.map(({ series: { t, v, low, high } }) => [t, v, low ?? v, high ?? v] as uPlot.AlignedData);
  return tables.length ? uPlot.join(tables) : [[]];
}

function place(value: number, axis: Axis): string {
  return axis === "seconds" ? duration(value) : `step ${number(Math.round(value))}`;
}

interface Shape {
  axis: Axis;
  width: number;
  height: number;
  sync?: string | undefined;
  small?: boolean | undefined;
  marks: { current: Mark[] };
  show: (index: number | null) => void;
}

function options(lines: Line[], { axis, width, height, sync, small, marks, show }: Shape): uPlot.Options {
  const style = getComputedStyle(document.documentElement);
  const colour = (name: string) => style.getPropertyValue(name).trim();
  const font = `11px ${style.getPropertyValue("--font")}`;
  const common = { stroke: colour("--muted"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font };
  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  lines.forEach((line, i) => {
    const stroke = colour(`--c${line.colour}`);
    series.push({ label: line.label, stroke, width: line.strong ? 2.25 : 1.5, points: { show: line.series.t.length < 2, size: 5 } });
    const bound: uPlot.Series = { stroke: "transparent", width: 0, points: { show: false } };
    series.push(bound, { ...bound });
    if (line.series.low) bands.push({ series: [3 + 3 * i, 2 + 3 * i], fill: `${stroke}2e` });
  });
  return {
    width,
    height,
    series,
    bands,
    legend: { show: false },
    scales: { x: { time: false }, y: { range: valueRange } },
    cursor: {
      y: false,
      points: { size: 6 },
      ...(sync ? { sync: { key: sync } } : {}),
    },
    axes: [
      { ...common, size: 28, space: small ? 60 : 80, values: (_, splits) => splits.map((value) => (axis === "seconds" ? shortTime(value) : number(value, 3))) },
      { ...common, size: small ? 46 : 54, values: (_, splits) => splits.map((value) => number(value, 3)) },
    ],
    hooks: { setCursor: [(own) => show(own.cursor.idx ?? null)] },
    plugins: [marksPlugin(marks, colour)],
  };
}

/** A constant is drawn as a line in the middle, and 0 at the bottom of 0 to 1. */
function valueRange(_: uPlot, low: number | null, high: number | null): uPlot.Range.MinMax {
  if (low === null || high === null || (low === 0 && high === 0)) return [0, 1];
  if (low === high) return [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  return uPlot.rangeNum(low, high, 0.1, true);
}

function shortTime(seconds: number): string {
  if (seconds < 120) return `${number(seconds, 3)} s`;
  return seconds < 7200 ? `${number(seconds / 60, 3)} min` : `${number(seconds / 3600, 3)} h`;
}
