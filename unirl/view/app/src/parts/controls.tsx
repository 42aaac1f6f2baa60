// Small parts that pages share: states, facts, switches, what went wrong.

import type { ComponentChildren } from "preact";
import { useEffect } from "preact/hooks";
import { setQuery } from "../data/route";
import type { Answer } from "../data/hooks";
import type { Axis } from "../data/types";

const STATES: Record<string, [string, string]> = {
  training: ["●", "training"],
  ended: ["■", "ended"],
  interrupted: ["❙❙", "interrupted"],
  gave_up: ["✕", "gave up"],
  stale: ["○", "silent"],
  unreadable: ["?", "unreadable"],
};

export function State({ state }: { state: string }) {
  const [sign, words] = STATES[state] ?? ["•", state];
  return (
    <span class={`state ${state}`}>
      <span aria-hidden="true">{sign}</span> {words}
    </span>
  );
}

export function Facts({ facts }: { facts: [string, ComponentChildren, string?][] }) {
  return (
    <dl class="facts">
      {facts.map(([name, value, note]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
          {note && <dd class="note">{note}</dd>}
        </div>
      ))}
    </dl>
  );
}

export function Problem({ parts }: { parts: string[] }) {
  const [what, ...more] = parts;
  return (
    <div class="problem" role="alert">
      <strong>{what}</strong>
      {more.filter(Boolean).map((part) => (
        <p key={part}>{part}</p>
      ))}
    </div>
  );
}

/** The answer when it is there; before, and where there is none, what is said instead. */
export function Loaded<T>({ answer, children }: { answer: Answer<T>; children: (data: T) => ComponentChildren }) {
  if (answer.data !== undefined) {
    return (
      <>
        {answer.error && <Problem parts={answer.error} />}
        {children(answer.data)}
      </>
    );
  }
  if (answer.error) return <Problem parts={answer.error} />;
  return (
    <p class="empty" aria-busy="true">
      Loading …
    </p>
  );
}

interface ChoiceProps<V extends string> {
  label: string;
  value: V;
  choices: [V, string][];
  onChange: (value: V) => void;
}

/** A few exclusive choices side by side. */
export function Choice<V extends string>({ label, value, choices, onChange }: ChoiceProps<V>) {
  return (
    <fieldset class="choice">
      <legend>{label}</legend>
      {choices.map(([each, words]) => (
        <label key={each} class={each === value ? "chosen" : ""}>
          <input type="radio" name={label} value={each} checked={each === value} onChange={() => onChange(each)} />
          {words}
        </label>
      ))}
    </fieldset>
  );
}

export function axisOf(query: URLSearchParams): Axis {
  return query.get("x") === "seconds" ? "seconds" : "step";
}

export function AxisChoice({ axis }: { axis: Axis }) {
  const choices: [Axis, string][] = [
    ["step", "steps"],
    ["seconds", "seconds"],
  ];
  return <Choice label="by" value={axis} choices={choices} onChange={(value) => setQuery({ x: value === "step" ? null : value })} />;
}

interface PanelProps {
  title: string;
  aside?: ComponentChildren;
  /** As wide as the page. */
  wide?: boolean;
  children: ComponentChildren;
}

export function Panel({ title, aside, wide, children }: PanelProps) {
  return (
    <section class={wide ? "panel wide" : "panel"} aria-label={title}>
      <header>
        <h2>{title}</h2>
        {aside}
      </header>
      {children}
    </section>
  );
}

export function Title({ children }: { children: string }) {
  useEffect(() => {
    document.title = `${children} · UniRL`;
  }, [children]);
  return <h1 tabIndex={-1}>{children}</h1>;
}
