// The address: what is shown is behind the #, so that links, "back" and saved files work alike.

import { useEffect, useState } from "preact/hooks";

export interface Route {
  /** Parts of the path: ["runs", ID, "episodes"]. */
  path: string[];
  query: URLSearchParams;
}

export function parseRoute(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  return { path: path.split("/").filter(Boolean).map(decode), query: new URLSearchParams(query) };
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function link(path: (string | number)[], query: Record<string, string | number | null | undefined> = {}): string {
  const known = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(known.map(([name, value]) => [name, String(value)])).toString();
  return `#/${path.map((part) => encodeURIComponent(part)).join("/")}${text ? `?${text}` : ""}`;
}

/** Changes parameters of the address; in place: without a step for the button "back". */
export function setQuery(change: Record<string, string | null>, inPlace = true): void {
  const { path, query } = parseRoute(location.hash);
  const all = { ...Object.fromEntries(query), ...change };
  const target = link(path, all);
  if (target === location.hash) return;
  if (inPlace) {
    history.replaceState(null, "", target);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = target;
  }
}

export function useRoute(): Route {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const changed = () => setHash(location.hash);
    addEventListener("hashchange", changed);
    changed(); // it may have changed before anybody listened
    return () => removeEventListener("hashchange", changed);
  }, []);
  return parseRoute(hash);
}
