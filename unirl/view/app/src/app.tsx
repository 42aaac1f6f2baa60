// The frame of all pages: where one is, what is shown, the way back.

import { useEffect, useRef, useState } from "preact/hooks";
import { SourceContext, useAnswer, useSource } from "./data/hooks";
import { link, useRoute } from "./data/route";
import type { Source } from "./data/source";
import type { SweepRow } from "./data/types";
import { ComparePage } from "./pages/compare";
import { OverviewPage } from "./pages/overview";
import { RunPage } from "./pages/run";
import { SweepPage, SweepsPage } from "./pages/sweeps";

export function App({ source }: { source: Source }) {
  const route = useRoute();
  const main = useRef<HTMLElement>(null);
  const place = route.path.join("/");
  const isFirst = useRef(true);
  useEffect(() => {
    // A reader of the screen starts at the new page's head, as after a link to another document.
    if (!isFirst.current) main.current?.querySelector("h1")?.focus();
    isFirst.current = false;
  }, [place]);
  const [page, id] = route.path;
  return (
    <SourceContext.Provider value={source}>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); main.current?.focus(); }}>
        To the content
      </a>
      <header class="top">
        <a class="brand" href={link([])}>
          <Logo /> UniRL
        </a>
        <nav aria-label="Pages">
          <a href={link([])} aria-current={page === undefined ? "page" : undefined}>
            Runs
          </a>
          <SweepsLink isHere={page === "sweeps"} />
        </nav>
        {source.saved === null && <Connection />}
        {source.saved !== null && (
          <span class="saved">
            saved <time dateTime={new Date(source.saved * 1000).toISOString()}>{new Date(source.saved * 1000).toLocaleString()}</time>
          </span>
        )}
      </header>
      <main id="main" ref={main} tabIndex={-1}>
        {page === "runs" && id ? (
          <RunPage key={id} id={id} rest={route.path.slice(2)} query={route.query} />
        ) : page === "sweeps" && id ? (
          <SweepPage key={id} id={id} query={route.query} />
        ) : page === "sweeps" ? (
          <SweepsPage query={route.query} />
        ) : page === "compare" ? (
          <ComparePage query={route.query} />
        ) : (
          <OverviewPage query={route.query} />
        )}
      </main>
    </SourceContext.Provider>
  );
}

/** Only where there are sweeps. */
function SweepsLink({ isHere }: { isHere: boolean }) {
  const answer = useAnswer<SweepRow[]>("/api/sweeps");
  if (!answer.data?.length) return null;
  return (
    <a href={link(["sweeps"])} aria-current={isHere ? "page" : undefined}>
      Sweeps
    </a>
  );
}

function Connection() {
  const source = useSource();
  const [isOpen, setOpen] = useState(false);
  useEffect(() => source.onConnection(setOpen), [source]);
  return (
    <span class={isOpen ? "live open" : "live"} role="status">
      {isOpen ? "● live" : "○ not connected"}
    </span>
  );
}

function Logo() {
  return (
    <svg viewBox="0 0 20 20" width="20" height="20" aria-hidden="true">
      <path d="M3 4v7a6 6 0 0 0 12 0V4" fill="none" stroke="currentColor" stroke-width="3" stroke-linecap="round" />
      <path d="M12 6.5 15 3l3 3.500" fill="none" stroke="currentColor" stroke-width="2" stroke-linecap="round" stroke-linejoin="round" />
    </svg>
  );
}
