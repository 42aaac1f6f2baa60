// Sweeps: which there are, and of one its trials with what they were given and what came out.

import { duration, number, plain, plural } from "../data/format";
import { useAnswer, useLive, useThrottle } from "../data/hooks";
import { link, setQuery } from "../data/route";
import type { Sweep, SweepRow, Trial } from "../data/types";
import { Facts, Loaded, Panel, Problem, Title } from "../parts/controls";
import { type Column, Table } from "../parts/table";

const SIGNS: Record<string, string> = { running: "●", stopped: "❙❙", finished: "■", failed: "✕" };

export function SweepsPage({ query }: { query: URLSearchParams }) {
  const answer = useAnswer<SweepRow[]>("/api/sweeps");
  useLive([], { list: useThrottle(answer.reload, 2000) });
  return (
    <>
      <Title>Sweeps</Title>
      <Loaded answer={answer}>
        {(rows) =>
          rows.length ? (
            <section class="panel" aria-label="Sweeps">
              <Table
                label="Sweeps"
                columns={ofSweeps}
                rows={rows}
                id={(row) => row.id}
                sort={query.get("sort") ?? "name"}
                onSort={(sort) => setQuery({ sort })}
              />
              {rows.filter((row) => row.error).map((row) => <Problem key={row.id} parts={row.error ?? []} />)}
            </section>
          ) : (
            <p class="empty">There are no sweeps in these folders. unirl sweep FILE makes one.</p>
          )
        }
      </Loaded>
    </>
  );
}

const ofSweeps: Column<SweepRow>[] = [
  { key: "name", label: "Sweep", by: (row) => row.name, cell: (row) => <a class="name" href={link(["sweeps", row.id])}>{plain(row.name)}</a> },
  { key: "trials", label: "Trials", by: (row) => row.trials, numeric: true, cell: (row) => number(row.trials) },
  { key: "statuses", label: "Of these", cell: (row) => statuses(row.statuses) },
  { key: "metric", label: "Objective", by: (row) => row.metric, cell: (row) => (row.metric ? `${plain(row.metric)}, ${row.mode}` : "–"), minor: true },
  { key: "best", label: "Best", by: (row) => row.best, numeric: true, cell: (row) => number(row.best) },
  { key: "seconds", label: "Time", by: (row) => row.seconds, numeric: true, minor: true, cell: (row) => duration(row.seconds) },
];

function statuses(counts: Record<string, number> = {}): string {
  return Object.entries(counts).map(([status, count]) => `${number(count)} ${plain(status)}`).join(", ") || "–";
}

export function SweepPage({ id, query }: { id: string; query: URLSearchParams }) {
  const answer = useAnswer<Sweep>(`/api/sweeps/${id}`);
  useLive([], { list: useThrottle(answer.reload, 2000) });
  return (
    <Loaded answer={answer}>
      {(sweep) => (
        <>
          <Title>{plain(sweep.name)}</Title>
          <Facts
            facts={[
              ["Objective", sweep.metric ? `${plain(sweep.metric)}, ${sweep.mode}` : "–"],
              ["Trials", plural(sweep.trials.length, "trial")],
              ["Time", duration(sweep.seconds)],
            ]}
          />
          <Scatter sweep={sweep} chosen={query.get("by")} />
          <Trials sweep={sweep} sort={query.get("sort") ?? ""} />
        </>
      )}
    </Loaded>
  );
}

function Trials({ sweep, sort }: { sweep: Sweep; sort: string }) {
  const columns: Column<Trial>[] = [
    {
      key: "trial",
      label: "Trial",
      by: (row) => row.trial,
      cell: (row) => (row.runs[0] ? <a class="name" href={link(["runs", row.runs[0].id])}>{number(row.trial)}</a> : number(row.trial)),
    },
    ...sweep.settings.map((key): Column<Trial> => {
      const isNumber = sweep.trials.every((row) => typeof row.settings[key] === "number");
      return { key: `=${key}`, label: key, numeric: isNumber, by: (row) => sortable(row.settings[key]), cell: (row) => shown(row.settings[key]) };
    }),
    { key: "mean", label: "Objective", by: (row) => row.mean, numeric: true, cell: (row) => spread(row) },
    { key: "rung", label: "Rungs", by: (row) => row.rung, numeric: true, minor: true, cell: (row) => number(row.rung) },
    { key: "steps", label: "Steps", by: (row) => row.steps, numeric: true, minor: true, cell: (row) => number(row.steps, 3) },
    {
      key: "status",
      label: "Status",
      by: (row) => row.status,
      cell: (row) => (
        <span title={plain(row.reason ?? "")}>
          <span aria-hidden="true">{SIGNS[row.status] ?? "•"}</span> {plain(row.status)}
        </span>
      ),
    },
    {
      key: "runs",
      label: "Seeds",
      minor: true,
      cell: (row) => row.runs.map((run) => <a key={run.id} class="seed" href={link(["runs", run.id])}>{plain(run.seed)} </a>),
    },
  ];
  const ids = sweep.trials.flatMap((trial) => trial.runs.map((run) => run.id)).slice(0, 40);
  return (
    <Panel title="Trials, the best first" wide aside={ids.length ? <a href={link([], { runs: ids.join(",") })}>Their curves</a> : undefined}>
      <Table label="Trials" columns={columns} rows={sweep.trials} sorted={!sort} id={(row) => String(row.trial)} sort={sort} onSort={(next) => setQuery({ sort: next })} />
    </Panel>
  );
}

function spread(row: Trial): string {
  const std = typeof row.std === "number" ? ` ± ${number(row.std, 2)}` : "";
  return `${number(row.mean)}${std}`;
}

function shown(value: unknown): string {
  return typeof value === "number" ? number(value) : plain(value);
}

function sortable(value: unknown): string | number | null {
  return value === undefined || value === null ? null : typeof value === "number" ? value : JSON.stringify(value);
}

const WIDTH = 640;
const HEIGHT = 220;
const EDGE = 30;

/** The objective by one setting: where good values are, and whether more of them would be worth a try. */
function Scatter({ sweep, chosen }: { sweep: Sweep; chosen: string | null }) {
  const varied = sweep.settings.filter((key) => new Set(sweep.trials.map((row) => JSON.stringify(row.settings[key]))).size > 1);
  const key = chosen !== null && varied.includes(chosen) ? chosen : varied[0];
  const found = sweep.trials.filter((row) => row.status !== "failed" && typeof row.mean === "number" && Number.isFinite(row.mean));
  if (key === undefined || found.length < 2) return null;
  const isNumber = found.every((row) => typeof row.settings[key] === "number");
  const names = [...new Set(found.map((row) => shown(row.settings[key])))].sort();
  const raw = found.map((row) => (isNumber ? Number(row.settings[key]) : names.indexOf(shown(row.settings[key]))));
  const isLog = isNumber && Math.min(...raw) > 0 && Math.max(...raw) / Math.min(...raw) > 20;
  const xs = raw.map((value) => (isLog ? Math.log10(value) : value));
  const ys = found.map((row) => row.mean as number);
  const x = scale(xs, EDGE, WIDTH - EDGE);
  const y = scale(ys, HEIGHT - EDGE, EDGE / 2);
  const label = `${sweep.metric ?? "objective"} by ${key}`;
  return (
    <Panel
      title="Objective by a setting"
      wide
      aside={
        <label>
          by{" "}
          <select value={key} onChange={(event) => setQuery({ by: event.currentTarget.value })}>
            {varied.map((each) => <option key={each} value={each}>{each}</option>)}
          </select>
        </label>
      }
    >
      <svg class="scatter" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`${plain(label)}: ${plural(found.length, "trial")}`}>
        <line x1={EDGE} y1={HEIGHT - EDGE} x2={WIDTH - EDGE} y2={HEIGHT - EDGE} />
        {(isNumber ? [0, found.length - 1].map((at) => ranked(found, raw, at)) : names.map((name, at): [number, string] => [at, name])).map(([value, text]) => (
          <text key={text} x={x(isLog ? Math.log10(value) : value)} y={HEIGHT - 8} text-anchor="middle">{text}</text>
        ))}
        <text x={EDGE} y={12}>{number(Math.max(...ys))}</text>
        <text x={EDGE} y={HEIGHT - EDGE - 4}>{number(Math.min(...ys))}</text>
        {found.map((row, at) => (
          <circle key={row.trial} class={row.status} cx={x(xs[at] as number)} cy={y(ys[at] as number)} r={5}>
            <title>{`trial ${row.trial}: ${shown(row.settings[key])}, ${spread(row)}`}</title>
          </circle>
        ))}
      </svg>
    </Panel>
  );
}

/** The value that is so many places from the smallest, and its text. */
function ranked(found: Trial[], raw: number[], at: number): [number, string] {
  const value = [...raw].sort((a, b) => a - b)[Math.min(at, found.length - 1)] as number;
  return [value, number(value)];
}

function scale(values: number[], from: number, to: number): (value: number) => number {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return (value) => (high > low ? from + ((value - low) / (high - low)) * (to - from) : (from + to) / 2);
}
