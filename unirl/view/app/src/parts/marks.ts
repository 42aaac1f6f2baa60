// Events on the time axis of a chart: a line, and a sign of its own for each kind.

import type uPlot from "uplot";
import type { Axis, RunEvent } from "../data/types";

export interface Mark {
  place: number;
  kind: Kind;
}

export type Kind = "fault" | "restart" | "scale" | "start" | "end" | "other";

export const KINDS: Record<string, Kind> = {
  died: "fault",
  left_out: "fault",
  gave_up: "fault",
  restarted: "restart",
  resumed: "restart",
  scaled: "scale",
  drained: "scale",
  left: "scale",
  started: "start",
  ended: "end",
};

export const SIGNS: Record<Kind, string> = { fault: "✕", restart: "↻", scale: "◆", start: "▸", end: "■", other: "•" };
const COLOURS: Record<Kind, string> = { fault: "--bad", restart: "--good", scale: "--c3", start: "--muted", end: "--muted", other: "--muted" };

export function kindOf(event: RunEvent): Kind {
  return KINDS[event.event] ?? "other";
}

/** What changed the run while it ran; starts and ends of all members would hide it. */
export function marksOf(events: RunEvent[], axis: Axis): Mark[] {
  return events.flatMap((event) => {
    const kind = kindOf(event);
    const place = event[axis];
    return typeof place === "number" && kind !== "start" && kind !== "end" ? [{ place, kind }] : [];
  });
}

export function marksPlugin(marks: { current: Mark[] }, colour: (name: string) => string): uPlot.Plugin {
  return {
    hooks: {
      draw: (plot) => {
        const { ctx, bbox } = plot;
        const ratio = devicePixelRatio;
        ctx.save();
        ctx.font = `${12 * ratio}px sans-serif`;
        ctx.textAlign = "center";
        for (const { place, kind } of marks.current) {
          const x = Math.round(plot.valToPos(place, "x", true));
          if (x < bbox.left || x > bbox.left + bbox.width) continue;
          ctx.strokeStyle = ctx.fillStyle = colour(COLOURS[kind]);
          ctx.lineWidth = ratio;
          ctx.setLineDash([3 * ratio, 3 * ratio]);
          ctx.beginPath();
          ctx.moveTo(x, bbox.top + 14 * ratio);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
          ctx.fillText(SIGNS[kind], x, bbox.top + 11 * ratio);
        }
        ctx.restore();
      },
    },
  };
}
