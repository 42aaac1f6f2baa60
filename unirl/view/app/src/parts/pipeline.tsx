// The pipeline as it is: pools fill slots, the queue holds them, the learner takes batches, weights flow back.

import { number, percent, plain, plural, rate } from "../data/format";
import { useWidth } from "../data/hooks";
import { unitOf } from "../data/units";
import type { Pipeline, PoolState, Run, Value } from "../data/types";

const MAX_CELLS = 64;
const NARROW = 560;
const BOX = { width: 250, height: 86 };

interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

export function PipelineDrawing({ run }: { run: Run }) {
  const [frame, width] = useWidth<HTMLDivElement>();
  const pipeline = run.pipeline;
  return (
    <div class="pipeline" ref={frame}>
      {pipeline ? width > 0 && <Drawing run={run} pipeline={pipeline} width={width} /> : <p class="empty">This run has written nothing about it.</p>}
    </div>
  );
}

function Drawing({ run, pipeline, width }: { run: Run; pipeline: Pipeline; width: number }) {
  const pools: PoolState[] = pipeline.pools?.length ? pipeline.pools : [{ name: "actors" }];
  const { actors = {}, queue = {}, learner = {}, weights = {} } = pipeline;
  const unit = unitOf(run);
  const isNarrow = width < NARROW;
  const gap = 14;
  const tall = pools.length * (BOX.height + gap) - gap;
  const place = layout(isNarrow, width, pools.length, tall, gap);
  const isLive = run.state === "training";
  const limitsActors = run.limit === "actors" || run.limit === "rewards";
  const words = [
    ...pools.map((pool) => [pool.name, ...poolLines(pool)].join(", ")),
    `actors: ${rate(actors.rate, unit)}, wait ${percent(actors.wait)} of their time`,
    `queue: ${queueLines(queue).join(", ")}`,
    `learner: ${rate(learner.rate, unit)}, waits ${percent(learner.wait)} of its time`,
    `weights: version ${number(weights.version)}`,
    run.limit ? `limited by: ${run.limit}` : "",
  ];
  return (
    <svg width={width} height={place.height} viewBox={`0 0 ${width} ${place.height}`} role="img" aria-label={words.filter(Boolean).join(". ")}>
      <defs>
        <marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">
          <path d="M0 0 8 4 0 8z" />
        </marker>
      </defs>
      {place.pools.map((box, i) => (
        <Arrow key={i} from={box} to={place.queue} isNarrow={isNarrow} isLive={isLive} />
      ))}
      <Arrow from={place.queue} to={place.learner} isNarrow={isNarrow} isLive={isLive} />
      <WeightsArrow from={place.learner} pools={place.pools} isNarrow={isNarrow} isLive={isLive} label={`weights, version ${number(weights.version)}`} width={width} />
      {pools.map((pool, i) => (
        <Part key={pool.name} box={place.pools[i] as Box} title={plain(pool.name)} limits={limitsActors} lines={[...poolLines(pool), ...(pools.length === 1 ? workLines(actors, unit) : [])]} />
      ))}
      <Part box={place.queue} title="queue" lines={queueLines(queue)}>
        <Cells box={place.queue} slots={queue.slots ?? 0} ready={queue.ready ?? 0} running={queue.running ?? 0} />
      </Part>
      <Part
        box={place.learner}
        title={plain(learner.name ?? "learner")}
        limits={run.limit === "learner"}
        lines={[...workLines(learner, unit), ...(typeof learner.updates_per_second === "number" ? [`${number(learner.updates_per_second, 3)} updates/s`] : [])]}
      />
    </svg>
  );
}

function poolLines({ members, wanted, most, helpers, share }: PoolState): string[] {
  const isPartly = typeof wanted === "number" && typeof members === "number" && wanted !== members;
  const count = typeof members === "number" ? plural(members, "member") : "";
  const range = [isPartly ? `of ${number(wanted)}` : "", typeof most === "number" && most !== wanted ? `up to ${number(most)}` : ""];
  const more = [helpers?.count ? `${number(helpers.count)} × ${plain(helpers.role ?? "helper")}` : "", typeof share === "number" && share !== 1 ? `share ${number(share)}` : ""];
  return [[count, ...range].filter(Boolean).join(" "), ...more].filter(Boolean);
}

function workLines({ rate: value, wait }: { rate?: Value; wait?: Value }, unit: string): string[] {
  return [rate(value, unit), ...(typeof wait === "number" ? [`waits ${percent(wait)}`] : [])];
}

function queueLines({ ready, running, slots, max_staleness: bound }: NonNullable<Pipeline["queue"]>): string[] {
  const size = typeof slots === "number" ? ` of ${number(slots)} slots` : "";
  const age = typeof bound === "number" ? [`at most ${plural(bound, "update")} old`] : [];
  return [`${number(ready)} ready, ${number(running)} running${size}`, ...age];
}

function layout(isNarrow: boolean, width: number, count: number, tall: number, gap: number) {
  const back = 34;
  if (isNarrow) {
    const own = { width: Math.min(240, width - 60), height: BOX.height };
    const pools = Array.from({ length: count }, (_, i) => ({ ...own, x: 1, y: 14 + i * (BOX.height + gap) }));
    const queue = { ...own, x: 1, y: 14 + tall + 36, height: BOX.height + 16 };
    const learner = { ...own, x: 1, y: queue.y + queue.height + 36 };
    return { pools, queue, learner, height: learner.y + learner.height + 14 };
  }
  const boxWidth = Math.min(BOX.width, (width - 120) / 3);
  const middle = 14 + Math.max(tall, BOX.height + 16) / 2;
  const pools = Array.from({ length: count }, (_, i) => ({ x: 1, y: middle - tall / 2 + i * (BOX.height + gap), width: boxWidth, height: BOX.height }));
  const queue = { x: (width - boxWidth) / 2, y: middle - BOX.height / 2 - 8, width: boxWidth, height: BOX.height + 16 };
  const learner = { x: width - boxWidth - 1, y: middle - BOX.height / 2, width: boxWidth, height: BOX.height };
  return { pools, queue, learner, height: middle + Math.max(tall, BOX.height + 16) / 2 + back + 8 };
}

function Part({ box, title, lines, limits, children }: { box: Box; title: string; lines: string[]; limits?: boolean; children?: preact.ComponentChildren }) {
  return (
    <g class={limits ? "part limits" : "part"}>
      <rect x={box.x} y={box.y} width={box.width} height={box.height} rx={8} />
      <text class="title" x={box.x + 12} y={box.y + 22}>
        {title.length > 20 ? `${title.slice(0, 19)}…` : title}
      </text>
      {lines.slice(0, 3).map((line, i) => (
        <text key={i} x={box.x + 12} y={box.y + 41 + 16 * i}>
          {line}
        </text>
      ))}
      {limits && (
        <g class="flag">
          <rect x={box.x + 10} y={box.y - 11} width={108} height={19} rx={9.5} />
          <text x={box.x + 64} y={box.y + 3} text-anchor="middle">
            limits the run
          </text>
        </g>
      )}
      {children}
    </g>
  );
}

function Cells({ box, slots, ready, running }: { box: Box; slots: number; ready: number; running: number }) {
  if (!slots) return null;
  const cells = Math.min(slots, MAX_CELLS);
  const room = box.width - 24;
  const columns = Math.min(cells, 32);
  const size = room / columns;
  const scale = cells / slots;
  const rows = Math.ceil(cells / columns);
  const high = Math.min(10, 18 / rows);
  return (
    <g class="cells" aria-hidden="true">
      {Array.from({ length: cells }, (_, i) => {
        const kind = i < ready * scale ? "ready" : i < (ready + running) * scale ? "running" : "free";
        const [column, row] = [i % columns, Math.floor(i / columns)];
        return <rect key={i} class={kind} x={box.x + 12 + column * size} y={box.y + box.height - 26 + row * (high + 2)} width={Math.max(1, size - 1.5)} height={high} rx={1.5} />;
      })}
    </g>
  );
}

function Arrow({ from, to, isNarrow, isLive }: { from: Box; to: Box; isNarrow: boolean; isLive: boolean }) {
  const path = isNarrow
    ? `M${from.x + from.width / 2} ${from.y + from.height + 2} V${to.y - 4}`
    : curve(from.x + from.width + 2, from.y + from.height / 2, to.x - 4, to.y + to.height / 2);
  return <path class={isLive ? "arrow live" : "arrow"} d={path} marker-end="url(#head)" />;
}

function curve(x1: number, y1: number, x2: number, y2: number): string {
  const middle = (x1 + x2) / 2;
  return `M${x1} ${y1} C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
}

interface WeightsArrowProps {
  from: Box;
  pools: Box[];
  isNarrow: boolean;
  isLive: boolean;
  label: string;
  width: number;
}

function WeightsArrow({ from, pools, isNarrow, isLive, label, width }: WeightsArrowProps) {
  const [first, lowest] = [pools[0] as Box, pools[pools.length - 1] as Box];
  if (isNarrow) {
    const x = from.x + from.width + 24;
    const path = `M${from.x + from.width + 2} ${from.y + from.height / 2} H${x} V${first.y + first.height / 2} H${first.x + first.width + 6}`;
    return (
      <g>
        <path class={isLive ? "arrow weights live" : "arrow weights"} d={path} marker-end="url(#head)" />
        <text class="label" transform={`translate(${x + 14} ${(from.y + first.y + first.height) / 2}) rotate(-90)`} text-anchor="middle">
          {label}
        </text>
      </g>
    );
  }
  const y = Math.max(from.y + from.height, lowest.y + lowest.height) + 22;
  const path = `M${from.x + from.width / 2} ${from.y + from.height + 2} V${y} H${lowest.x + lowest.width / 2} V${lowest.y + lowest.height + 6}`;
  return (
    <g>
      <path class={isLive ? "arrow weights live" : "arrow weights"} d={path} marker-end="url(#head)" />
      <text class="label" x={width / 2} y={y + 16} text-anchor="middle">
        {label}
      </text>
    </g>
  );
}
