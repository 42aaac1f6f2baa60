// What one wants to know of a run first: its curve, the pipeline, how old samples are, what went wrong.

import { useEffect, useMemo } from "preact/hooks";
import { number, plain } from "../data/format";
import { useAnswer } from "../data/hooks";
import { link } from "../data/route";
import { useSeriesOf } from "../data/series_of";
import { at, combine, last, type Line } from "../data/series";
import type { Axis, Evaluation, Run, RunEvent, RunRow, Series, SeriesAnswer, Staleness } from "../data/types";
import { Chart } from "../parts/chart";
import { AxisChoice, Loaded, Panel } from "../parts/controls";
import { type Mark, marksOf } from "../parts/marks";
import { PipelineDrawing } from "../parts/pipeline";
import { StalenessDrawing } from "../parts/staleness";
import { RETURN } from "./curves";
import { EventList } from "./events";

const DISCARDED = "queue/discarded/";
const AGES = "staleness/age/";
const MAX_SEEDS = 16;

export function SummaryTab({ run, axis, news }: { run: Run; axis: Axis; news: number }) {
  const path = `/api/runs/${run.id}`;
  const names = useAnswer<string[]>(`${path}/names`);
  const events = useAnswer<RunEvent[]>(`${path}/events`);
  const all = useAnswer<RunRow[]>("/api/runs");
  const metric = run.result_name ?? RETURN;
  const discarded = (names.data ?? []).filter((name) => name.startsWith(DISCARDED));
  const seeds = (all.data ?? []).filter((each) => run.group && each.group === run.group && each.id !== run.id).slice(0, MAX_SEEDS);
  // All columns of the run are read from its file at once; what follows finds them there.
  const recorded = (names.data ?? []).filter((name) => name.startsWith(AGES));
  const asked = { runs: run.id, names: [metric, ...discarded, ...recorded].join(","), points: 600, x: axis };
  const own = useAnswer<SeriesAnswer>(names.loading && !names.data ? null : "/api/series", asked);
  const isRead = own.data !== undefined;
  const ages = useAnswer<Staleness>(isRead ? `${path}/staleness` : null);
  const ids = isRead ? seeds.map((each) => each.id) : [];
  const others = useSeriesOf(ids, { names: [metric], axis, points: 300 });
  // Evaluations know their step alone.
  const clock = useAnswer<SeriesAnswer>(isRead && axis === "seconds" ? "/api/series" : null, { runs: run.id, names: "seconds", points: 1000, x: "step" });
  useEffect(() => {
    if (!news) return;
    for (const each of [names, own, events, ages]) each.reload();
  }, [news]);

  const seconds = useMemo(() => endsOf(clock.data?.[run.id]?.seconds), [clock.data]);
  const marks = useMemo(() => marksOf(events.data ?? [], axis), [events.data, axis]);
  const mine = own.data?.[run.id] ?? {};
  const lines = useMemo(() => withBand(run, metric, mine[metric], others.series, seeds), [own.data, others.series, metric]);
  return (
    <div class="columns">
      <Panel title="Pipeline" wide>
        <PipelineDrawing run={run} />
      </Panel>
      <Panel title="Curve" aside={<AxisChoice axis={axis} />}>
        <Chart title={plain(metric)} lines={lines} axis={axis} marks={marks} height={280} />
      </Panel>
      <Panel title="Age of samples when they were learned from">
        <Loaded answer={ages}>{(found) => <StalenessDrawing staleness={found} bound={run.pipeline?.queue?.max_staleness ?? null} />}</Loaded>
      </Panel>
      <Evaluations all={run.evaluations ?? []} axis={axis} seconds={axis === "seconds" ? seconds : undefined} marks={marks} />
      <Discards names={discarded} series={mine} axis={axis} marks={marks} />
      <Panel title="Faults, restarts, scaling" wide aside={<a href={link(["runs", run.id, "events"])}>All events</a>}>
        <EventList events={(events.data ?? []).filter((event) => event.event !== "started")} limit={8} />
      </Panel>
    </div>
  );
}

/** The run's own curve, and the band of all seeds of its config. */
function withBand(run: Run, metric: string, own: Series | undefined, others: SeriesAnswer, seeds: RunRow[]): Line[] {
  if (!own) return [];
  const found = seeds.flatMap((each) => others[each.id]?.[metric] ?? []);
  const line: Line = { label: plain(run.name), series: own, colour: 0, strong: true };
  if (!found.length) return [line];
  const band: Line = { label: `mean of ${number(found.length + 1)} seeds, lowest to highest`, series: combine([own, ...found]), colour: 6 };
  return [band, { ...line, series: { t: own.t, v: own.v } }];
}

/** What only grows has its highest value where a bin ends. */
function endsOf(series: Series | undefined): Series | undefined {
  return series && { t: series.t, v: series.high ?? series.v };
}

interface EvaluationsProps {
  all: Evaluation[];
  axis: Axis;
  /** The seconds of the run by its steps, where these are the axis. */
  seconds: Series | undefined;
  marks: Mark[];
}

function Evaluations({ all, axis, seconds, marks }: EvaluationsProps) {
  const lines = useMemo((): Line[] => {
    const placed = all.map((each) => ({ ...each, place: seconds && typeof each.step === "number" ? at(seconds, each.step)[0] : each[axis] }));
    const known = placed.filter((each) => typeof each.place === "number" && typeof each.return_mean === "number" && !each.by_hand);
    if (!known.length) return [];
    const mean = known.map((each) => each.return_mean as number);
    const spread = known.map((each) => each.return_std ?? 0);
    const series: Series = { t: known.map((each) => each.place as number), v: mean, low: mean.map((m, i) => m - (spread[i] ?? 0)), high: mean.map((m, i) => m + (spread[i] ?? 0)) };
    return [{ label: "mean of the episodes, with their deviation", series, colour: 2 }];
  }, [all, axis, seconds]);
  return (
    <Panel title="Evaluations">
      {lines.length ? <Chart title="Return of evaluations" lines={lines} axis={axis} marks={marks} height={200} /> : <p class="empty">None so far.</p>}
    </Panel>
  );
}

function Discards({ names, series, axis, marks }: { names: string[]; series: Record<string, Series>; axis: Axis; marks: Mark[] }) {
  const known = names.filter((name) => (last(series[name]) ?? 0) > 0);
  const lines = known.map((name, i): Line => ({ label: name.slice(DISCARDED.length), series: series[name] as Series, colour: i % 8 }));
  return (
    <Panel title="Samples discarded, by reason">
      {lines.length ? <Chart title="Discarded since the run began" lines={lines} axis={axis} marks={marks} height={200} /> : <p class="empty">None.</p>}
    </Panel>
  );
}
