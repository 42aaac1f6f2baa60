// Series of several runs, asked for run by run: each is drawn when it is there, and asked for once.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { useSource } from "./hooks";
import type { Axis, SeriesAnswer } from "./types";

/** Requests at a time: the server reads files of 100 MB for each. */
const AT_ONCE = 2;

interface Wanted {
  names: string[];
  axis: Axis;
  points: number;
}

export interface SeriesOf {
  series: SeriesAnswer;
  /** How many runs are still asked for. */
  missing: number;
  /** Asks again for these runs, and shows what is known meanwhile. */
  reload: (ids: string[]) => void;
}

export function useSeriesOf(ids: string[], { names, axis, points }: Wanted): SeriesOf {
  const source = useSource();
  const key = [names.join(","), axis, points].join(" ");
  const [state, setState] = useState<{ key: string; series: SeriesAnswer }>({ key, series: {} });
  const [stale, setStale] = useState<string[]>([]);
  const newest = useRef(state);
  newest.current = state;
  const series = state.key === key ? state.series : {};
  const missing = ids.filter((id) => !(id in series));
  useEffect(() => {
    const abort = new AbortController();
    const known = newest.current.key === key ? newest.current.series : {};
    const queue = ids.filter((id) => !(id in known) || stale.includes(id));
    const work = async () => {
      for (let id = queue.shift(); id !== undefined; id = queue.shift()) {
        const asked = { runs: id, names: names.join(","), points, x: axis };
        // A run that cannot be read has no curve; its page says why.
        const answer = await source.get<SeriesAnswer>("/api/series", asked, abort.signal).catch(() => ({}) as SeriesAnswer);
        if (abort.signal.aborted) return;
        const own = answer[id] ?? {};
        setState((last) => ({ key, series: { ...(last.key === key ? last.series : {}), [id as string]: own } }));
      }
    };
    for (let worker = 0; worker < AT_ONCE; worker++) void work();
    return () => abort.abort();
  }, [source, key, ids.join(","), stale]);
  const reload = useCallback((again: string[]) => setStale([...again]), []);
  return { series, missing: missing.length, reload };
}
