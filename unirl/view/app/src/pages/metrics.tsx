// All numbers of a run: small charts in groups by the beginning of their names, found by typing.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { number, plain } from "../data/format";
import { useAnswer } from "../data/hooks";
import { setQuery } from "../data/route";
import type { Line } from "../data/series";
import type { Axis, Run, SeriesAnswer } from "../data/types";
import { AxisChoice, Loaded, Panel } from "../parts/controls";
import { Chart } from "../parts/chart";

interface MetricsProps {
  run: Run;
  axis: Axis;
  news: number;
  query: URLSearchParams;
}

export function MetricsTab({ run, axis, news, query }: MetricsProps) {
  const answer = useAnswer<string[]>(`/api/runs/${run.id}/names`);
  const [text, setText] = useState(query.get("find") ?? "");
  return (
    <Loaded answer={answer}>
      {(names) => {
        const words = text.toLowerCase().split(/\s+/).filter(Boolean);
        const found = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
        return (
          <>
            <div class="bar">
              <label class="search">
                <span class="hidden">Find metrics</span>
                <input
                  type="search"
                  placeholder="Find metrics: loss, staleness max …"
                  value={text}
                  onInput={(event) => {
                    setText(event.currentTarget.value);
                    setQuery({ find: event.currentTarget.value });
                  }}
                />
              </label>
              <span class="count" role="status">
                {number(found.length)} of {number(names.length)} metrics
              </span>
              <AxisChoice axis={axis} />
            </div>
            {[...byPrefix(found)].map(([prefix, own]) => (
              <MetricGroup key={prefix} prefix={prefix} names={own} run={run} axis={axis} news={news} />
            ))}
            {!found.length && <p class="empty">No metric has such a name.</p>}
          </>
        );
      }}
    </Loaded>
  );
}

export function byPrefix(names: string[]): Map<string, string[]> {
  const groups = new Map<string, string[]>();
  for (const name of [...names].sort()) {
    const prefix = name.includes("/") ? name.slice(0, name.indexOf("/")) : "";
    groups.set(prefix, [...(groups.get(prefix) ?? []), name]);
  }
  return groups;
}

function MetricGroup({ prefix, names, run, axis, news }: { prefix: string; names: string[]; run: Run; axis: Axis; news: number }) {
  const frame = useRef<HTMLDivElement>(null);
  // Only what has come into view is asked for and drawn.
  const [isSeen, setSeen] = useState(false);
  useEffect(() => {
    if (isSeen || !frame.current) return;
    const observer = new IntersectionObserver(([entry]) => entry?.isIntersecting && setSeen(true), { rootMargin: "300px" });
    observer.observe(frame.current);
    return () => observer.disconnect();
  }, [isSeen]);
  const asked = { runs: run.id, names: names.join(","), points: 300, x: axis };
  const answer = useAnswer<SeriesAnswer>(isSeen ? "/api/series" : null, asked);
  useEffect(() => {
    if (news && isSeen) answer.reload();
  }, [news]);
  const lines = useMemo(() => {
    const own = answer.data?.[run.id] ?? {};
    return new Map(names.map((name): [string, Line[]] => [name, own[name] ? [{ label: name.slice(prefix ? prefix.length + 1 : 0), series: own[name], colour: 0 }] : []]));
  }, [answer.data, names.join(",")]);
  return (
    <Panel title={prefix || "Other"} aside={<span class="count">{number(names.length)}</span>}>
      <div class="small-charts" ref={frame} style={{ minHeight: "180px" }}>
        {isSeen && names.map((name) => <Chart key={name} title={plain(name)} lines={lines.get(name) ?? []} axis={axis} height={150} sync="metrics" small />)}
      </div>
    </Panel>
  );
}
