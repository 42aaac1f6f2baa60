// From what is known of a token to its colour: a few levels, each a class that both schemes define.

import { number } from "./format";
import type { Token } from "./types";

export type ColourBy = "advantage" | "logp" | "mismatch" | "version" | "none";

export const COLOUR_WORDS: Record<ColourBy, string> = {
  advantage: "advantage",
  logp: "log-probability",
  mismatch: "learner − engine",
  version: "version",
  none: "nothing",
};

const LEVELS = 8;
/** Log-probability that has the strongest colour. */
const LEAST_LOGP = -5;

export function valueOf(token: Token, by: ColourBy): number | null {
  if (by === "mismatch") {
    const known = typeof token.learner_logp === "number" && typeof token.logp === "number";
    return known ? (token.learner_logp as number) - (token.logp as number) : null;
  }
  return by === "none" ? null : (token[by] ?? null);
}

export interface Scale {
  by: ColourBy;
  className: (token: Token) => string;
  /** From the first to the last level: its class and what it stands for; empty: there is nothing to tell. */
  legend: { className: string; label: string }[];
}

/** Which of the ways to colour say anything of these tokens. */
export function known(tokens: Token[]): ColourBy[] {
  const all: ColourBy[] = ["advantage", "logp", "mismatch", "version"];
  return [...all.filter((by) => tokens.some((token) => token.drawn && valueOf(token, by) !== null)), "none"];
}

export function scaleOf(tokens: Token[], by: ColourBy): Scale {
  const values = tokens.flatMap((token) => (token.drawn ? (valueOf(token, by) ?? []) : []));
  if (by === "none" || !values.length) return { by, className: () => "", legend: [] };
  if (by === "advantage" || by === "mismatch") return diverging(by, values);
  const [low, high] = by === "logp" ? [LEAST_LOGP, 0] : extent(values);
  // An unlikely token is what one looks for; of versions, the newest.
  const share = (value: number) => (by === "logp" ? 1 - (value - low) / (high - low) : (value - low) / (high - low || 1));
  const level = (value: number) => clamp(Math.round(share(value) * LEVELS));
  const ends = by === "logp" ? ["0 (certain)", `${low} or less`] : [number(low), number(high)];
  return { by, className: classes(by, (value) => `s${level(value)}`), legend: ramp("s", ends) };
}

function diverging(by: ColourBy, values: number[]): Scale {
  const largest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  const level = (value: number) => (largest ? clamp(Math.round((value / largest + 1) * (LEVELS / 2))) : LEVELS / 2);
  return { by, className: classes(by, (value) => `d${level(value)}`), legend: largest ? ramp("d", [number(-largest, 2), "0", number(largest, 2)]) : ramp("d", ["0", "0", "0"]) };
}

function classes(by: ColourBy, level: (value: number) => string): (token: Token) => string {
  return (token) => {
    const value = token.drawn ? valueOf(token, by) : null;
    return value === null ? "" : level(value);
  };
}

function ramp(kind: "s" | "d", labels: string[]): Scale["legend"] {
  return Array.from({ length: LEVELS + 1 }, (_, i) => {
    const place = (i / LEVELS) * (labels.length - 1);
    return { className: `${kind}${i}`, label: Number.isInteger(place) ? (labels[place] ?? "") : "" };
  });
}

function extent(values: number[]): [number, number] {
  return [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
}

function clamp(level: number): number {
  return Math.max(0, Math.min(LEVELS, level));
}
