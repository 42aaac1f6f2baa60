// One run: its head, its tabs, and the news that reach all of them.

import { useState } from "preact/hooks";
import { duration, number, percent, plain, rate } from "../data/format";
import { useAnswer, useLive, useSource, useThrottle } from "../data/hooks";
import { link } from "../data/route";
import { url } from "../data/source";
import type { Run } from "../data/types";
import { unitOf } from "../data/units";
import { axisOf, Facts, Loaded, Problem, State, Title } from "../parts/controls";
import { ConfigTab } from "./config";
import { EpisodePage } from "./episode";
import { EpisodesTab } from "./episodes";
import { EventsTab } from "./events";
import { GroupPage } from "./group";
import { MetricsTab } from "./metrics";
import { SummaryTab } from "./summary";
import { VideosTab } from "./videos";

interface RunPageProps {
  id: string;
  /** What follows the run in the path: a tab, and what is shown of it. */
  rest: string[];
  query: URLSearchParams;
}

export function RunPage({ id, rest, query }: RunPageProps) {
  const answer = useAnswer<Run>(`/api/runs/${id}`);
  const [tab = "", what] = rest;
  // Counts what arrived: parts ask again for what they show.
  const [news, setNews] = useState(0);
  const refresh = useThrottle(() => {
    answer.reload();
    setNews((last) => last + 1);
  }, 1500);
  useLive([id], { rows: refresh });
  return (
    <Loaded answer={answer}>
      {(run) => {
        if (tab === "episodes" && what !== undefined) return <EpisodePage run={run} episode={what} query={query} />;
        if (tab === "groups" && what !== undefined) return <GroupPage run={run} ticket={what} />;
        return (
          <>
            <Head run={run} tab={tab} query={query} />
            {tab === "" && <SummaryTab run={run} axis={axisOf(query)} news={news} />}
            {tab === "metrics" && <MetricsTab run={run} axis={axisOf(query)} news={news} query={query} />}
            {tab === "episodes" && <EpisodesTab run={run} query={query} />}
            {tab === "videos" && <VideosTab run={run} />}
            {tab === "config" && <ConfigTab run={run} query={query} />}
            {tab === "events" && <EventsTab run={run} news={news} />}
          </>
        );
      }}
    </Loaded>
  );
}

function Head({ run, tab, query }: { run: Run; tab: string; query: URLSearchParams }) {
  const source = useSource();
  const tabs: [string, string, boolean][] = [
    ["", "Overview", true],
    ["metrics", "Metrics", true],
    ["episodes", run.has?.episodes ? "Episodes" : "Samples", !!(run.has?.episodes || run.has?.samples)],
    ["videos", "Videos", !!run.videos?.length],
    ["events", "Events", true],
    ["config", "Config", true],
  ];
  const share = run.total_steps ? (run.step ?? 0) / run.total_steps : null;
  const limited = run.limit ? `${run.limit}` : "–";
  return (
    <>
      <div class="head">
        <Title>{plain(run.name)}</Title>
        <State state={run.state} />
        <span class="muted">{[run.recipe, run.env ?? run.model, run.seed === null || run.seed === undefined ? null : `seed ${run.seed}`].filter(Boolean).map(plain).join(" · ")}</span>
        {source.saved === null && (
          <a class="button" href={url("/api/page", { runs: run.id })} download={`${run.name}.html`}>
            Save as one HTML file
          </a>
        )}
      </div>
      {run.error && <Problem parts={Array.isArray(run.error) ? run.error : [run.error]} />}
      <Facts
        facts={[
          [run.result_name ?? "Result", number(run.result)],
          ["Steps", number(run.step), share === null ? undefined : `${percent(share)} of ${number(run.total_steps)}`],
          ["Rate", rate(run.rate, unitOf(run))],
          ["Limited by", limited],
          ["Time", duration(run.seconds)],
          ["Version of the weights", number(run.pipeline?.weights?.version)],
        ]}
      />
      {run.part_of && (
        <p class="parts">
          One of several policies of <a href={link(["runs", run.part_of])}>this run</a>.
        </p>
      )}
      {!!run.parts?.length && (
        <p class="parts">
          Other policies of this run:{" "}
          {run.parts.map((part, i) => (
            <a key={part} href={link(["runs", part])}>
              policy {i + 1}
            </a>
          ))}
        </p>
      )}
      <nav class="tabs" aria-label="Parts of the run">
        {tabs.map(([key, words, isThere]) =>
          isThere ? (
            <a key={key} href={link(key ? ["runs", run.id, key] : ["runs", run.id], { x: query.get("x") })} aria-current={key === tab ? "page" : undefined}>
              {words}
            </a>
          ) : null,
        )}
      </nav>
    </>
  );
}
