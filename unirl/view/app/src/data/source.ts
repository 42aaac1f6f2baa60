// Where answers come from: the server, or the JSON block of a page that was saved as one file.

import { type LiveHandlers, LiveHub } from "./live";
import type { Comparison, EpisodeList, EpisodeRow, Run, SeriesAnswer } from "./types";

export type Parameters = Record<string, string | number | undefined>;

export interface Source {
  /** Seconds since 1970 at which the page was saved; null: the server answers. */
  readonly saved: number | null;
  get<T>(path: string, parameters?: Parameters, signal?: AbortSignal): Promise<T>;
  /** The address of a file that the page links to; null: a saved page does not hold it. */
  file(path: string): string | null;
  /** Calls the handlers as news arrive, until the function that it returns is called. */
  live(runs: string[], handlers: LiveHandlers): () => void;
  /** Says at once, and whenever it changes, whether news arrive. */
  onConnection(watcher: (isOpen: boolean) => void): () => void;
}

export class AnswerError extends Error {
  constructor(readonly parts: string[]) {
    super(parts.join(": "));
  }
}

export function url(path: string, parameters: Parameters = {}): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== undefined && value !== "") query.set(name, String(value));
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

class Server implements Source {
  readonly saved = null;
  private readonly hub = new LiveHub();

  async get<T>(path: string, parameters?: Parameters, signal?: AbortSignal): Promise<T> {
    let answer: Response;
    try {
      answer = await fetch(url(path, parameters), { signal: signal ?? null });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new AnswerError(["The server does not answer", "unirl view has ended, or the machine sleeps", "start it again"]);
    }
    if (answer.status === 401) {
      throw new AnswerError(["No access", "the address must hold the token once", "open the address that unirl view printed"]);
    }
    const body: unknown = await answer.json().catch(() => null);
    if (!answer.ok) throw new AnswerError(errorParts(body) ?? [`The server answered ${answer.status}`]);
    return body as T;
  }

  file(path: string): string {
    return path;
  }

  live(runs: string[], handlers: LiveHandlers): () => void {
    return this.hub.subscribe(runs, handlers);
  }

  onConnection(watcher: (isOpen: boolean) => void): () => void {
    return this.hub.onConnection(watcher);
  }
}

interface Block {
  saved: number;
  answers: Record<string, unknown>;
  files?: Record<string, string>;
}

class Saved implements Source {
  readonly saved: number;

  constructor(private readonly block: Block) {
    this.saved = block.saved;
  }

  get<T>(path: string, parameters: Parameters = {}): Promise<T> {
    try {
      return Promise.resolve(this.answer(path, parameters) as T);
    } catch (error) {
      return Promise.reject(error);
    }
  }

  file(path: string): string | null {
    return this.block.files?.[decodeURIComponent(path)] ?? null;
  }

  live(): () => void {
    return () => undefined;
  }

  onConnection(): () => void {
    return () => undefined;
  }

  private answer(path: string, parameters: Parameters): unknown {
    if (path === "/api/series") return this.series(parameters);
    const found = this.block.answers[path];
    if (found === undefined) {
      throw new AnswerError(["This is not in the saved page", "it holds what was chosen when it was saved", "open the run with unirl view"]);
    }
    const error = errorParts(found);
    if (error) throw new AnswerError(error);
    if (path === "/api/compare") return this.comparison(found as Comparison, parameters);
    return path.endsWith("/episodes") ? filterEpisodes(found as EpisodeList, parameters) : found;
  }

  private series(parameters: Parameters): SeriesAnswer {
    const all = (this.block.answers[`/api/series?x=${parameters.x ?? "step"}`] ?? {}) as SeriesAnswer;
    const names = String(parameters.names ?? "").split(",");
    const answer: SeriesAnswer = {};
    for (const run of String(parameters.runs ?? "").split(",")) {
      const own = all[run] ?? {};
      answer[run] = Object.fromEntries(names.flatMap((name) => (own[name] ? [[name, own[name]]] : [])));
    }
    return answer;
  }

  private comparison(all: Comparison, parameters: Parameters): Comparison {
    const saved = (this.block.answers["/api/runs"] as Run[]).map((run) => run.id);
    const places = String(parameters.runs ?? "").split(",").map((id) => saved.indexOf(id));
    return {
      keys: all.keys.map(({ key, values }) => {
        const own = places.map((place) => values[place]);
        return { key, values: own, differs: new Set(own.map((value) => JSON.stringify(value))).size > 1 };
      }),
    };
  }
}

/** What the server would do with the same parameters, among the episodes that were saved. */
export function filterEpisodes(all: EpisodeList, wanted: Parameters): EpisodeList {
  const text = String(wanted.text ?? "").toLowerCase();
  const within = (value: number | null | undefined, low: unknown, high: unknown) =>
    (low === undefined || low === "" || (value ?? -Infinity) >= Number(low)) &&
    (high === undefined || high === "" || (value ?? Infinity) <= Number(high));
  const equal = (value: unknown, asked: unknown) => asked === undefined || asked === "" || String(value) === String(asked);
  const rows = all.rows.filter(
    (row) =>
      equal(row.task, wanted.task) &&
      equal(row.ending, wanted.ending) &&
      equal(row.split, wanted.split) &&
      within(row.reward, wanted.reward_min, wanted.reward_max) &&
      within(row.version_max, wanted.version_min, undefined) &&
      within(row.version_min, undefined, wanted.version_max) &&
      (!text || JSON.stringify(row).toLowerCase().includes(text)),
  );
  const sort = String(wanted.sort ?? "new");
  const sign = sort.startsWith("-") ? -1 : 1;
  const key = sort.replace(/^-/, "");
  if (key === "old") rows.reverse();
  else if (key !== "new") rows.sort((a, b) => sign * (Number(a[key as keyof EpisodeRow] ?? 0) - Number(b[key as keyof EpisodeRow] ?? 0)));
  return { ...all, total: rows.length, rows, next: null };
}

function errorParts(body: unknown): string[] | null {
  const error = (body as { error?: unknown } | null)?.error;
  if (Array.isArray(error)) return error.map(String);
  return typeof error === "string" ? [error] : null;
}

export function openSource(): Source {
  const block = document.getElementById("saved");
  return block ? new Saved(JSON.parse(block.textContent ?? "") as Block) : new Server();
}
