// What the steps of a run are: the rates of the recipes for language models count what a model writes.

import type { RunRow } from "./types";

const UNITS: Record<string, string> = { agent: "episodes", grpo: "completions" };

export function unitOf(run: Pick<RunRow, "recipe">): string {
  return UNITS[run.recipe ?? ""] ?? "steps";
}
