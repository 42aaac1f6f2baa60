// The tokens of a turn, coloured; the values of one at a time are text, found by pointer and by keys.

import { useMemo, useRef, useState } from "preact/hooks";
import { number, visible } from "../data/format";
import { type Scale, valueOf } from "../data/scales";
import type { Token } from "../data/types";

const PAGE = 4000;

export function Tokens({ tokens, scale, label }: { tokens: Token[]; scale: Scale; label: string }) {
  const [current, setCurrent] = useState<number | null>(null);
  const [most, setMost] = useState(PAGE);
  const [isTable, setTable] = useState(false);
  const frame = useRef<HTMLDivElement>(null);
  const spans = useMemo(
    () =>
      tokens.slice(0, most).map((token, i) => (
        <span key={i} data-i={i} class={`t ${token.drawn ? "drawn" : "given"} ${scale.className(token)}`}>
          {visible(token.text)}
        </span>
      )),
    [tokens, scale, most],
  );

  function onKey(event: KeyboardEvent): void {
    const moves: Record<string, number> = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, Home: -Infinity, End: Infinity };
    const move = moves[event.key];
    if (move === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    select(Math.max(0, Math.min(tokens.length - 1, most - 1, (current ?? -1) + move)));
  }

  function select(index: number | null): void {
    frame.current?.querySelector(".current")?.classList.remove("current");
    const element = index === null ? null : frame.current?.children[index];
    element?.classList.add("current");
    element?.scrollIntoView({ block: "nearest" });
    setCurrent(index);
  }

  const token = current === null ? undefined : tokens[current];
  return (
    <div class="tokens-part">
      <div class="bar">
        <p class="readout" aria-live="polite">
          {token ? describe(token, current as number) : `${number(tokens.length)} tokens, ${number(tokens.filter((each) => each.drawn).length)} drawn by the policy. Point at one, or use the arrow keys, for its values.`}
        </p>
        <button type="button" aria-pressed={isTable} onClick={() => setTable(!isTable)}>
          As a table
        </button>
      </div>
      {isTable ? (
        <TokenTable tokens={tokens.slice(0, most)} label={label} />
      ) : (
        <div
          ref={frame}
          class="tokens"
          tabIndex={0}
          role="group"
          aria-label={`Tokens of ${label}; arrow keys move from one to the next`}
          onKeyDown={onKey}
          onPointerOver={(event) => {
            const index = (event.target as HTMLElement).dataset.i;
            if (index !== undefined) setCurrent(Number(index));
          }}
        >
          {spans}
        </div>
      )}
      {tokens.length > most && (
        <button type="button" onClick={() => setMost(most + PAGE)}>
          Show {number(Math.min(PAGE, tokens.length - most))} more of {number(tokens.length)} tokens
        </button>
      )}
    </div>
  );
}

function describe(token: Token, index: number): string {
  const parts = [`Token ${index + 1} “${visible(token.text)}”`];
  if (!token.drawn) return `${parts[0]}: given, not drawn`;
  const add = (name: string, value: number | null | undefined) => typeof value === "number" && parts.push(`${name} ${number(value)}`);
  add("log-probability", token.logp);
  add("learner's", token.learner_logp);
  add("difference", valueOf(token, "mismatch"));
  add("advantage", token.advantage);
  add("version", token.version);
  return parts.join(" · ");
}

function TokenTable({ tokens, label }: { tokens: Token[]; label: string }) {
  return (
    <div class="scroll tall" tabIndex={0} role="region" aria-label={`Tokens of ${label}`}>
      <table>
        <thead>
          <tr>
            <th scope="col" class="numeric">No.</th>
            <th scope="col">Token</th>
            <th scope="col">Drawn</th>
            <th scope="col" class="numeric">Log-probability</th>
            <th scope="col" class="numeric">Learner's</th>
            <th scope="col" class="numeric">Advantage</th>
            <th scope="col" class="numeric">Version</th>
          </tr>
        </thead>
        <tbody>
          {tokens.map((token, i) => (
            <tr key={i}>
              <td class="numeric">{i + 1}</td>
              <td class="code">{visible(token.text)}</td>
              <td>{token.drawn ? "yes" : "no"}</td>
              <td class="numeric">{number(token.logp)}</td>
              <td class="numeric">{number(token.learner_logp)}</td>
              <td class="numeric">{number(token.advantage)}</td>
              <td class="numeric">{number(token.version)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

export function Legend({ scale, words }: { scale: Scale; words: string }) {
  if (!scale.legend.length) return null;
  return (
    <span class="token-legend">
      {words}
      <span class="ramp">
        {scale.legend.map(({ className, label }) => (
          <i key={className} class={className}>
            {label}
          </i>
        ))}
      </span>
    </span>
  );
}
