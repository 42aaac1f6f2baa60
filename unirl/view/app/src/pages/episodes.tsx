// The episodes or samples of a run, found by what is known of them.

import { useState } from "preact/hooks";
import { duration, number, plain } from "../data/format";
import { useAnswer } from "../data/hooks";
import { link, setQuery } from "../data/route";
import type { EpisodeList, EpisodeRow, Run } from "../data/types";
import { Loaded } from "../parts/controls";
import { type Column, Table } from "../parts/table";

const PAGE = 50;
const NUMBERS: [string, string][] = [
  ["reward_min", "Reward from"],
  ["reward_max", "to"],
  ["version_min", "Version from"],
  ["version_max", "to"],
];
const BY_ID: Record<string, string> = { new: "-id", old: "id" };
const FIELDS = ["task", "ending", "split", ...NUMBERS.map(([name]) => name), "text"];

export function EpisodesTab({ run, query }: { run: Run; query: URLSearchParams }) {
  const [cursor, setCursor] = useState<string[]>([]);
  const wanted = Object.fromEntries(FIELDS.flatMap((name) => (query.get(name) ? [[name, query.get(name) as string]] : [])));
  const sort = query.get("sort") ?? "new";
  const after = cursor[cursor.length - 1];
  const answer = useAnswer<EpisodeList>(`/api/runs/${run.id}/episodes`, { ...wanted, sort, limit: PAGE, after });

  function find(change: Record<string, string | null>): void {
    setCursor([]);
    setQuery(change);
  }

  return (
    <section class="panel" aria-label="Episodes">
      <form class="bar find" role="search" aria-label="Find episodes" onSubmit={(event) => event.preventDefault()}>
        {["task", "ending", "split"].map((name) => (
          <Facet key={name} name={name} chosen={query.get(name) ?? ""} choices={answer.data?.facets?.[name] ?? []} onChange={(value) => find({ [name]: value })} />
        ))}
        {NUMBERS.map(([name, words]) => (
          <label key={name} class="short">
            <span>{words}</span>
            <input
              type="number"
              step="any"
              aria-label={words === "to" ? `${name.split("_")[0]} to` : undefined}
              value={query.get(name) ?? ""}
              onInput={(event) => find({ [name]: event.currentTarget.value })}
            />
          </label>
        ))}
        <label class="wide">
          <span>Text</span>
          <input type="search" value={query.get("text") ?? ""} onInput={(event) => find({ text: event.currentTarget.value })} />
        </label>
        {Object.keys(wanted).length > 0 && (
          <button type="button" onClick={() => find(Object.fromEntries(FIELDS.map((name) => [name, null])))}>
            All
          </button>
        )}
      </form>
      <Loaded answer={answer}>
        {(found) => (
          <>
            <div class="bar">
              <span class="count" role="status" aria-busy={answer.loading}>
                {number(found.total)} {found.total === 1 ? "episode" : "episodes"}
                {found.unsearched ? `; there was no time to search ${number(found.unsearched)} more` : ""}
              </span>
              <span class="actions">
                <button type="button" disabled={!cursor.length} onClick={() => setCursor(cursor.slice(0, -1))}>
                  Back
                </button>
                <span>
                  {found.rows.length ? `${number(cursor.length * PAGE + 1)} to ${number(cursor.length * PAGE + found.rows.length)}` : ""}
                </span>
                <button type="button" disabled={!found.next} onClick={() => found.next && setCursor([...cursor, found.next])}>
                  Next
                </button>
              </span>
            </div>
            {found.rows.length ? (
              <Table
                label="Episodes"
                columns={columns(run, found.rows)}
                rows={found.rows}
                sorted
                id={(row) => String(row.id)}
                sort={BY_ID[sort] ?? sort}
                onSort={(next) => find({ sort: next === "id" ? "old" : next === "-id" ? "new" : next })}
              />
            ) : (
              <p class="empty">No episode is like that.</p>
            )}
          </>
        )}
      </Loaded>
    </section>
  );
}

interface FacetProps {
  name: string;
  chosen: string;
  choices: (string | { value: string; count?: number })[];
  onChange: (value: string | null) => void;
}

function Facet({ name, chosen, choices, onChange }: FacetProps) {
  const all = choices.map((choice) => (typeof choice === "string" ? { value: choice } : choice));
  if (chosen && !all.some((choice) => choice.value === chosen)) all.push({ value: chosen });
  if (all.length < 2 && !chosen) return null;
  return (
    <label>
      <span>{name[0]?.toUpperCase() + name.slice(1)}</span>
      <select value={chosen} onChange={(event) => onChange(event.currentTarget.value || null)}>
        <option value="">any</option>
        {all.map((choice) => (
          <option key={choice.value} value={choice.value}>
            {plain(choice.value)}
            {"count" in choice && choice.count !== undefined ? ` (${number(choice.count)})` : ""}
          </option>
        ))}
      </select>
    </label>
  );
}

export function versions({ version_min, version_max }: Pick<EpisodeRow, "version_min" | "version_max">): string {
  if (typeof version_min !== "number" || version_min === version_max) return number(version_max);
  return `${number(version_min)} – ${number(version_max)}`;
}

function columns(run: Run, rows: EpisodeRow[]): Column<EpisodeRow>[] {
  const all: Column<EpisodeRow>[] = [
    {
      key: "id",
      label: "Episode",
      by: (row) => Number(row.id),
      cell: (row) => <a href={link(["runs", run.id, "episodes", row.id])}>{plain(String(row.id))}</a>,
    },
    {
      key: "ticket",
      label: "Ticket",
      numeric: true,
      cell: (row) => (typeof row.ticket === "number" && row.ticket >= 0 ? <a href={link(["runs", run.id, "groups", row.ticket])}>{number(row.ticket)}</a> : "–"),
    },
    { key: "task", label: "Task", cell: (row) => <span class="clip">{plain([row.task, row.task_id].filter(Boolean).join(" "))}</span> },
    { key: "text", label: "Text", cell: (row) => <span class="clip code">{plain(row.text ?? "").slice(0, 160)}</span>, minor: true },
    { key: "reward", label: "Reward", by: (row) => row.reward, numeric: true, cell: (row) => number(row.reward) },
    { key: "ending", label: "Ending", cell: (row) => <span class={`ending ${row.ending === "stop" ? "good" : ""}`}>{plain(row.ending)}</span> },
    { key: "turns", label: "Turns", by: (row) => row.turns, numeric: true, cell: (row) => number(row.turns) },
    { key: "tokens", label: "Tokens", by: (row) => row.tokens, numeric: true, cell: (row) => number(row.tokens), minor: true },
    { key: "version", label: "Version", numeric: true, cell: (row) => versions(row), minor: true },
    { key: "trained", label: "Learned at", numeric: true, cell: (row) => number(row.trained_version), minor: true },
    { key: "seconds", label: "Time", by: (row) => row.seconds, numeric: true, cell: (row) => duration(row.seconds), minor: true },
  ];
  return all.filter((column) => column.key !== "text" || rows.some((row) => row.text));
}
