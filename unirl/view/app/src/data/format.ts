// Numbers, times and texts as people read them.

const NONE = "–";

export function number(value: unknown, digits = 4): string {
  if (typeof value !== "number" || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value).replace(/\B(?=(\d{3})+$)/g, " ");
  if (size >= 1e9) return `${trim(value / 1e9, 3)}G`;
  if (size >= 1e6) return `${trim(value / 1e6, 3)}M`;
  if (size >= 1e4) return `${trim(value / 1e3, 3)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return trim(value, digits);
}

function trim(value: number, digits: number): string {
  return String(Number(value.toPrecision(digits)));
}

export function percent(share: unknown): string {
  return typeof share === "number" && Number.isFinite(share) ? `${Math.round(share * 100)} %` : NONE;
}

export function duration(seconds: unknown): string {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return NONE;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function ago(time: unknown, now = Date.now() / 1000): string {
  if (typeof time !== "number" || !Number.isFinite(time)) return NONE;
  const seconds = Math.max(0, now - time);
  if (seconds < 5) return "now";
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 48 * 3600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

export function rate(value: unknown, unit?: string | null): string {
  return typeof value === "number" && Number.isFinite(value) ? `${number(value, 3)} ${unit || "steps"}/s` : NONE;
}

export function bytes(value: unknown): string {
  return typeof value === "number" && Number.isFinite(value) ? `${number(value / 1e6, 2)} MB` : NONE;
}

export function plural(count: number, noun: string): string {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/**
 * Text of a model or tool as it can be shown: control characters, with which a text could act on a
 * terminal, and those that change the direction of what follows, are written out: \x1b, \u202e.
 */
export function visible(text: string): string {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g, (sign) => {
    const code = sign.charCodeAt(0).toString(16);
    return code.length > 2 ? `\\u${code.padStart(4, "0")}` : `\\x${code.padStart(2, "0")}`;
  });
}

export function plain(value: unknown): string {
  if (value === null || value === undefined) return NONE;
  return typeof value === "string" ? visible(value) : visible(JSON.stringify(value));
}
