// Answers and news as state of components.

import { createContext } from "preact";
import { useCallback, useContext, useEffect, useRef, useState } from "preact/hooks";
import type { LiveHandlers } from "./live";
import { AnswerError, type Parameters, type Source, url } from "./source";

export const SourceContext = createContext<Source>(undefined as unknown as Source);

export function useSource(): Source {
  return useContext(SourceContext);
}

export interface Answer<T> {
  data: T | undefined;
  error: string[] | undefined;
  loading: boolean;
  reload: () => void;
}

/** Keeps the last answer while the next one is loaded; path null: asks for nothing. */
export function useAnswer<T>(path: string | null, parameters?: Parameters): Answer<T> {
  const source = useSource();
  const key = path === null ? null : url(path, parameters);
  const [state, setState] = useState<{ for: string | null; data?: T; error?: string[]; loading: boolean }>({ for: null, loading: key !== null });
  const [round, setRound] = useState(0);
  useEffect(() => {
    if (path === null) return;
    const abort = new AbortController();
    setState((last) => ({ ...last, loading: true }));
    source.get<T>(path, parameters, abort.signal).then(
      (data) => abort.signal.aborted || setState({ for: path, data, loading: false }),
      (error: unknown) => {
        if (abort.signal.aborted) return;
        const parts = error instanceof AnswerError ? error.parts : [String(error)];
        setState((last) => ({ ...last, error: parts, loading: false }));
      },
    );
    return () => abort.abort();
  }, [source, key, round]);
  const reload = useCallback(() => setRound((last) => last + 1), []);
  // What another path answered is not shown as this one's.
  const own = state.for === path;
  return { data: own ? state.data : undefined, error: state.error, loading: state.loading, reload };
}

export function useLive(runs: string[], handlers: LiveHandlers): void {
  const source = useSource();
  const newest = useRef(handlers);
  newest.current = handlers;
  useEffect(
    () =>
      source.live(runs, {
        rows: () => newest.current.rows?.(),
        list: () => newest.current.list?.(),
      }),
    [source, runs.join(",")],
  );
}

/** The function, called soon, and at most once in so many milliseconds. */
export function useThrottle(call: () => void, milliseconds: number): () => void {
  const newest = useRef(call);
  newest.current = call;
  const timer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  const last = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);
  return useCallback(() => {
    if (timer.current !== undefined) return;
    const wait = Math.max(0, last.current + milliseconds - Date.now());
    timer.current = setTimeout(() => {
      timer.current = undefined;
      last.current = Date.now();
      newest.current();
    }, wait);
  }, [milliseconds]);
}

export function useWidth<E extends Element>(): [{ current: E | null }, number] {
  const element = useRef<E | null>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    if (!element.current) return;
    const observer = new ResizeObserver(([entry]) => entry && setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(element.current);
    return () => observer.disconnect();
  }, []);
  return [element, width];
}

/** Whether the system asks for it: a dark scheme, less motion. */
export function useMedia(query: string): boolean {
  const [matches, setMatches] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const media = matchMedia(query);
    const changed = () => setMatches(media.matches);
    changed();
    media.addEventListener("change", changed);
    return () => media.removeEventListener("change", changed);
  }, [query]);
  return matches;
}
