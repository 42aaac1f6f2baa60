// What the server answers. Everything but ids may be missing: runs are written by other versions, and half-written.

export type Axis = "step" | "seconds";
export type Value = number | null;

export interface RunRow {
  id: string;
  name: string;
  recipe?: string | null;
  group?: string | null;
  seed?: number | null;
  state: string;
  step?: Value;
  total_steps?: Value;
  seconds?: Value;
  started?: Value;
  updated?: Value;
  result?: Value;
  result_name?: string | null;
  rate?: Value;
  env?: string | null;
  model?: string | null;
  limit?: string | null;
  part_of?: string | null;
  /** Ids of the other policies of this run. */
  parts?: string[];
  error?: string[] | string | null;
}

export interface PoolState {
  name: string;
  members?: Value;
  /** How many it is to have; how many it may have. */
  wanted?: Value;
  most?: Value;
  /** What helps its members: environment workers. */
  helpers?: { role?: string; count?: Value } | null;
  share?: Value;
}

export interface Pipeline {
  pools?: PoolState[];
  actors?: { rate?: Value; wait?: Value };
  queue?: { slots?: Value; batch_size?: Value; max_staleness?: Value; ready?: Value; running?: Value };
  learner?: { name?: string | null; rate?: Value; wait?: Value; updates_per_second?: Value };
  weights?: { version?: Value };
}

export interface Evaluation {
  step?: Value;
  seconds?: Value;
  num_episodes?: Value;
  return_mean?: Value;
  return_std?: Value;
  /** Not during the training. */
  by_hand?: boolean;
}

export interface Video {
  name: string;
  bytes?: Value;
}

export interface Run extends RunRow {
  config?: Record<string, unknown>;
  command?: string | null;
  pipeline?: Pipeline;
  evaluations?: Evaluation[];
  videos?: Video[];
  checkpoints?: string[];
  has?: { samples?: boolean; episodes?: boolean; videos?: boolean };
}

export interface Series {
  t: number[];
  v: Value[];
  low?: Value[];
  high?: Value[];
}

export type SeriesAnswer = Record<string, Record<string, Series>>;

export interface RunEvent {
  time?: number;
  event: string;
  step?: Value;
  seconds?: Value;
  member?: string;
  agent?: string;
  node?: string;
  pool?: string;
  size?: Value;
  cause?: string;
  [more: string]: unknown;
}

export interface Staleness {
  t: number[];
  ages: number[];
  share: Value[][];
}

export interface Comparison {
  keys: { key: string; values: unknown[]; differs: boolean }[];
}

export interface EpisodeRow {
  id: string | number;
  ticket?: Value;
  place?: Value;
  task?: string | null;
  task_id?: string | null;
  split?: string | null;
  ending?: string | null;
  reward?: Value;
  version_min?: Value;
  version_max?: Value;
  trained_version?: Value;
  turns?: Value;
  drawn?: Value;
  tokens?: Value;
  seconds?: Value;
  why?: string | null;
  state?: string | null;
  text?: string | null;
}

export interface EpisodeList {
  total: number;
  rows: EpisodeRow[];
  next?: string | null;
  /** Of those that were to be searched for a text: how many were not, in the time that there is. */
  unsearched?: number;
  facets?: Record<string, (string | { value: string; count?: number })[]>;
}

export interface Token {
  text: string;
  id?: number;
  drawn?: boolean;
  logp?: Value;
  learner_logp?: Value;
  version?: Value;
  advantage?: Value;
}

export interface Turn {
  index: number;
  parent?: number | null;
  segment?: number | null;
  role?: string | null;
  /** How its prompt came about: prompt, extended, forked, rewritten, replayed. */
  origin?: string | null;
  /** False: nothing is learned from it. */
  trained?: boolean;
  /** Names of the tools that it calls. */
  tool?: string | null;
  ok?: boolean | null;
  error?: string | null;
  /** What it was given, and what it answered. */
  given?: string | null;
  text?: string | null;
  calls?: { name: string; arguments: string }[];
  reward?: Value;
  seconds_model?: Value;
  seconds_tool?: Value;
  finish?: string | null;
  versions?: number[];
  num_given?: Value;
  num_drawn?: Value;
  tokens?: Token[];
  /** How many tokens were left out. */
  cut?: Value;
}

export interface Episode extends Omit<EpisodeRow, "turns"> {
  rewards?: Record<string, unknown> | null;
  turns: Turn[];
  /** Where it was read: store or samples. */
  source?: string | null;
  /** Why there are no turns. */
  missing?: string[];
  /** Whether what the learner saw of its tokens is known. */
  learner_recorded?: boolean;
}

export interface SweepRow {
  id: string;
  name: string;
  metric?: string | null;
  mode?: string;
  seconds?: Value;
  /** How many. */
  trials?: Value;
  statuses?: Record<string, number>;
  best?: Value;
  error?: string[];
}

export interface Trial {
  trial: number;
  settings: Record<string, unknown>;
  mean?: Value;
  std?: Value;
  /** How many rungs all of its runs have reached. */
  rung: number;
  steps?: Value;
  status: string;
  reason?: string;
  runs: { id: string; seed: string }[];
}

export interface Sweep extends Omit<SweepRow, "trials"> {
  settings: string[];
  trials: Trial[];
}

export interface Group {
  ticket?: number;
  prompt?: string | null;
  rows: EpisodeRow[];
}
