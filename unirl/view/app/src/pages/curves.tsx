// Curves of several runs in one chart: each its own, or the seeds of one config as a band.

import { useMemo } from "preact/hooks";
import { number, plain } from "../data/format";
import { useAnswer, useLive, useSource, useThrottle } from "../data/hooks";
import { link, setQuery } from "../data/route";
import { useSeriesOf } from "../data/series_of";
import { combine, type Line } from "../data/series";
import { url } from "../data/source";
import type { Axis, RunRow, SeriesAnswer } from "../data/types";
import { AxisChoice } from "../parts/controls";
import { Chart } from "../parts/chart";

export const COLOURS = 8;
export const RETURN = "charts/episodic_return";

interface CurvesProps {
  runs: RunRow[];
  /** How many are chosen, drawn or not. */
  all: number;
  axis: Axis;
  name: string | null;
}

export function Curves({ runs, all, axis, name }: CurvesProps) {
  const source = useSource();
  const ids = runs.map((run) => run.id);
  const metric = name ?? runs.find((run) => run.result_name)?.result_name ?? RETURN;
  const names = useAnswer<string[]>(ids[0] === undefined ? null : `/api/runs/${ids[0]}/names`);
  const { series, missing, reload } = useSeriesOf(ids, { names: [metric], axis, points: 400 });
  const refresh = useThrottle(() => reload(runs.filter((run) => run.state === "training").map((run) => run.id)), 2000);
  useLive(ids, { rows: refresh });
  const lines = useMemo(() => grouped(runs, series, metric), [ids.join(","), series, metric]);
  const title = all > runs.length ? `${metric} (the first ${runs.length} of ${all})` : metric;
  return (
    <section class="panel" aria-label="Curves">
      <div class="bar">
        <label>
          Metric{" "}
          <input
            list="metric-names"
            class="metric"
            value={metric}
            onChange={(event) => setQuery({ metric: event.currentTarget.value || null })}
          />
        </label>
        <datalist id="metric-names">
          {names.data?.map((each) => <option key={each} value={each} />)}
        </datalist>
        <AxisChoice axis={axis} />
        <span class="actions">
          {runs.length > 1 && (
            <a class="button" href={link(["compare"], { runs: ids.join(",") })}>
              Compare {runs.length} configs
            </a>
          )}
          {source.saved === null && ids.length > 0 && (
            <a class="button" href={url("/api/page", { runs: ids.join(",") })} download="unirl-runs.html">
              Save as one HTML file
            </a>
          )}
        </span>
      </div>
      {missing > 0 && (
        <p class="note" aria-busy="true">
          Loading {missing === 1 ? "a curve" : `${number(missing)} curves`} …
        </p>
      )}
      {runs.length ? <Chart title={plain(title)} lines={lines} axis={axis} height={280} /> : <p class="empty">Choose runs below to see their curves.</p>}
    </section>
  );
}

/** Runs of one config are one line, with a band from the lowest to the highest of them. */
export function grouped(runs: RunRow[], answer: SeriesAnswer, metric: string): Line[] {
  const groups = new Map<string, RunRow[]>();
  for (const run of runs) {
    const key = run.group ?? run.id;
    groups.set(key, [...(groups.get(key) ?? []), run]);
  }
  return [...groups.values()].flatMap((members, i): Line[] => {
    const known = members.flatMap((run) => answer[run.id]?.[metric] ?? []);
    const first = members[0];
    if (!first || !known[0]) return [];
    const colour = i % COLOURS;
    if (known.length === 1) return [{ label: plain(first.name), series: known[0], colour }];
    return [{ label: `${plain(first.name)}: mean of ${number(known.length)} seeds, lowest to highest`, series: combine(known), colour, strong: true }];
  });
}
