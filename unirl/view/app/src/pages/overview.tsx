// All runs: a table to filter and to choose from, and the curves of those that are chosen.

import { useMemo, useState } from "preact/hooks";
import { ago, duration, number, percent, plain, rate } from "../data/format";
import { useAnswer, useLive, useThrottle } from "../data/hooks";
import { link, setQuery } from "../data/route";
import type { RunRow } from "../data/types";
import { unitOf } from "../data/units";
import { axisOf, Loaded, State, Title } from "../parts/controls";
import { type Column, sortRows, Table } from "../parts/table";
import { Curves } from "./curves";

const MAX_CURVES = 40;
const PAGE = 100;
const MAX_CHOSEN_BY_ITSELF = 6;

export function OverviewPage({ query }: { query: URLSearchParams }) {
  const answer = useAnswer<RunRow[]>("/api/runs");
  const refresh = useThrottle(answer.reload, 1000);
  useLive([], { list: refresh });
  return (
    <>
      <Title>Runs</Title>
      <Loaded answer={answer}>{(runs) => <Runs runs={runs} query={query} />}</Loaded>
    </>
  );
}

function Runs({ runs, query }: { runs: RunRow[]; query: URLSearchParams }) {
  const [filter, setFilter] = useState(query.get("filter") ?? "");
  const [most, setMost] = useState(PAGE);
  const remember = useThrottle(() => setQuery({ filter }), 500);
  const sort = query.get("sort") ?? "-updated";
  const asked = query.get("runs");
  const chosen = useMemo(() => new Set(asked === null ? newest(runs) : asked.split(",").filter(Boolean)), [asked, runs]);
  const shown = useMemo(() => sortRows(runs.filter(matches(filter)), columns, sort), [runs, filter, sort]);
  const drawn = runs.filter((run) => chosen.has(run.id)).slice(0, MAX_CURVES);

  function choose(ids: string[], isChosen: boolean): void {
    const next = new Set(chosen);
    for (const id of ids) isChosen ? next.add(id) : next.delete(id);
    setQuery({ runs: [...next].join(",") || "," });
  }

  const isAll = shown.length > 0 && shown.every((run) => chosen.has(run.id));
  const withBox: Column<RunRow>[] = [
    {
      key: "chosen",
      label: "Show",
      cell: (run) => (
        <input
          type="checkbox"
          aria-label={`Show ${plain(run.name)}`}
          checked={chosen.has(run.id)}
          onChange={(event) => choose([run.id], event.currentTarget.checked)}
        />
      ),
    },
    ...columns,
  ];
  if (!runs.length) {
    return (
      <p class="empty">
        No runs here yet. <code>unirl train @cartpole</code> makes one; it appears by itself.
      </p>
    );
  }
  return (
    <>
      <Curves runs={drawn} all={chosen.size} axis={axisOf(query)} name={query.get("metric")} />
      <section class="panel" aria-label="All runs">
        <div class="bar">
          <label class="search">
            <span class="hidden">Filter runs</span>
            <input
              type="search"
              placeholder="Filter: name, environment, recipe, state …"
              value={filter}
              onInput={(event) => {
                setFilter(event.currentTarget.value);
                remember();
              }}
            />
          </label>
          <span class="count" role="status">
            {shown.length === runs.length ? `${number(runs.length)} runs` : `${number(shown.length)} of ${number(runs.length)} runs`}
          </span>
          <label class="check">
            <input type="checkbox" checked={isAll} onChange={(event) => choose(shown.map((run) => run.id), event.currentTarget.checked)} />
            Show all of these
          </label>
        </div>
        <Table
          label="Runs"
          columns={withBox}
          rows={shown.slice(0, most)}
          sorted
          id={(run) => run.id}
          sort={sort}
          onSort={(next) => setQuery({ sort: next })}
          rowClass={(run) => (chosen.has(run.id) ? "chosen" : "")}
        />
        {shown.length > most && (
          <button type="button" class="more" onClick={() => setMost(most + PAGE)}>
            Show {number(Math.min(PAGE, shown.length - most))} more
          </button>
        )}
      </section>
    </>
  );
}

/** The newest run, and those that differ from it by their seed alone. */
function newest(runs: RunRow[]): string[] {
  const first = [...runs].sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0))[0];
  if (!first) return [];
  const seeds = first.group ? runs.filter((run) => run.group === first.group && run.id !== first.id) : [];
  return [first, ...seeds].slice(0, MAX_CHOSEN_BY_ITSELF).map((run) => run.id);
}

function matches(filter: string): (run: RunRow) => boolean {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  return (run) => {
    const text = [run.name, run.recipe, run.env, run.model, run.state, run.limit, run.seed].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  };
}

const columns: Column<RunRow>[] = [
  {
    key: "name",
    label: "Run",
    by: (run) => run.name,
    cell: (run) => (
      <a class="name" href={link(["runs", run.id])}>
        {plain(run.name)}
      </a>
    ),
  },
  { key: "state", label: "State", by: (run) => run.state, cell: (run) => <State state={run.state} /> },
  { key: "world", label: "Environment or model", by: (run) => run.env ?? run.model, cell: (run) => plain(run.env ?? run.model), minor: true },
  { key: "recipe", label: "Recipe", by: (run) => run.recipe, cell: (run) => plain(run.recipe), minor: true },
  { key: "seed", label: "Seed", by: (run) => run.seed, cell: (run) => number(run.seed), numeric: true, minor: true },
  {
    key: "step",
    label: "Steps",
    by: (run) => run.step,
    numeric: true,
    cell: (run) => (
      <span title={run.total_steps ? `${percent((run.step ?? 0) / run.total_steps)} of ${number(run.total_steps)}` : undefined}>
        {number(run.step, 3)}
        {run.total_steps ? <progress max={1} value={Math.min(1, (run.step ?? 0) / run.total_steps)} aria-label="of all steps" /> : null}
      </span>
    ),
  },
  { key: "result", label: "Result", by: (run) => run.result, numeric: true, cell: (run) => <span title={run.result_name ?? ""}>{number(run.result)}</span> },
  { key: "rate", label: "Rate", by: (run) => run.rate, numeric: true, minor: true, cell: (run) => rate(run.rate, unitOf(run)) },
  { key: "limit", label: "Limited by", by: (run) => run.limit, cell: (run) => run.limit ?? "–", minor: true },
  { key: "seconds", label: "Time", by: (run) => run.seconds, numeric: true, minor: true, cell: (run) => duration(run.seconds) },
  { key: "updated", label: "Last row", by: (run) => run.updated, numeric: true, cell: (run) => ago(run.updated) },
];
