// One episode as turns, stepped by buttons and keys; its tokens coloured by what is known of them.

import { useEffect, useMemo } from "preact/hooks";
import { duration, number, plain } from "../data/format";
import { useAnswer, useSource } from "../data/hooks";
import { link, setQuery } from "../data/route";
import { COLOUR_WORDS, type ColourBy, known, type Scale, scaleOf } from "../data/scales";
import type { Episode, Run, Turn } from "../data/types";
import { Facts, Loaded, Problem, Title } from "../parts/controls";
import { Text } from "../parts/text";
import { Legend, Tokens } from "../parts/tokens";
import { Outline } from "../parts/outline";
import { versions } from "./episodes";

const FORMATS = ["atif", "verifiers", "otlp"];

export function EpisodePage({ run, episode, query }: { run: Run; episode: string; query: URLSearchParams }) {
  const answer = useAnswer<Episode>(`/api/runs/${run.id}/episodes/${encodeURIComponent(episode)}`);
  return (
    <>
      <nav class="crumbs" aria-label="Where this is">
        <a href={link(["runs", run.id])}>{plain(run.name)}</a> / <a href={link(["runs", run.id, "episodes"])}>episodes</a>
      </nav>
      <Title>{`Episode ${plain(episode)}`}</Title>
      <Loaded answer={answer}>{(data) => <Steps run={run} id={episode} episode={data} query={query} />}</Loaded>
    </>
  );
}

function Steps({ run, id, episode, query }: { run: Run; id: string; episode: Episode; query: URLSearchParams }) {
  const source = useSource();
  const turns = Array.isArray(episode.turns) ? episode.turns : [];
  const index = Math.max(0, Math.min(turns.length - 1, Number(query.get("turn") ?? 0) || 0));
  const turn = turns[index];
  const tokens = useMemo(() => turns.flatMap((each) => each.tokens ?? []), [turns]);
  const ways = useMemo(() => known(tokens), [tokens]);
  const asked = query.get("colour") as ColourBy | null;
  const by = asked && ways.includes(asked) ? asked : (ways[0] ?? "none");
  const scale = useMemo(() => scaleOf(tokens, by), [tokens, by]);
  const exports = (episode.source === "store" ? FORMATS : []).flatMap((format) => {
    const href = source.file(`/api/runs/${run.id}/episodes/${encodeURIComponent(id)}/export?format=${format}`);
    return href === null ? [] : [{ format, href }];
  });
  const show = (next: number) => setQuery({ turn: String(Math.max(0, Math.min(turns.length - 1, next))) });

  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.altKey || event.ctrlKey || event.metaKey || target.closest("input, select, textarea, .tokens, .scroll")) return;
      const moves: Record<string, number> = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: turns.length - 1 };
      const next = moves[event.key];
      if (next === undefined) return;
      event.preventDefault();
      show(next);
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [index, turns.length]);

  return (
    <>
      <Facts
        facts={[
          ["Task", plain([episode.task, episode.task_id].filter(Boolean).join(" ") || null)],
          ["Reward", number(episode.reward), rewardWords(episode.rewards)],
          ["Ending", plain(episode.ending), episode.why ? plain(episode.why) : undefined],
          ["Versions", versions(episode), typeof episode.trained_version === "number" ? `learned at update ${number(episode.trained_version)}` : undefined],
          ["Time", duration(episode.seconds)],
          ["Tokens", number(episode.tokens), typeof episode.drawn === "number" ? `${number(episode.drawn)} drawn` : undefined],
        ]}
      />
      <div class="bar">
        {typeof episode.ticket === "number" && episode.ticket >= 0 && (
          <a class="button" href={link(["runs", run.id, "groups", episode.ticket])}>
            Its group, ticket {number(episode.ticket)}
          </a>
        )}
        {exports.length > 0 && (
          <span class="actions">
            Export
            {exports.map(({ format, href }) => (
              <a key={format} class="button" download={`episode-${id}.${format}.json`} href={href}>
                {format === "verifiers" ? format : format.toUpperCase()}
              </a>
            ))}
          </span>
        )}
      </div>
      {turn ? (
        <div class="episode">
          <Outline turns={turns} current={index} onSelect={show} />
          <section class="panel turn" aria-label={`Turn ${index + 1} of ${turns.length}`}>
            <header class="bar">
              <button type="button" disabled={index === 0} onClick={() => show(index - 1)} aria-keyshortcuts="ArrowLeft">
                <span aria-hidden="true">←</span>Previous
              </button>
              <h2 aria-live="polite">
                Turn {index + 1} of {turns.length}
              </h2>
              <button type="button" disabled={index === turns.length - 1} onClick={() => show(index + 1)} aria-keyshortcuts="ArrowRight">
                Next<span aria-hidden="true">→</span>
              </button>
              <label class="actions">
                Colour by{" "}
                <select value={by} onChange={(event) => setQuery({ colour: event.currentTarget.value })}>
                  {ways.map((way) => (
                    <option key={way} value={way}>
                      {COLOUR_WORDS[way]}
                    </option>
                  ))}
                </select>
              </label>
              <Legend scale={scale} words={COLOUR_WORDS[by]} />
            </header>
            {episode.learner_recorded === false && (
              <p class="note">What the learner saw of these tokens is recorded for a part of the newest batch now and then, and was not for these.</p>
            )}
            <TurnView key={index} turn={turn} label={`turn ${index + 1}`} scale={scale} />
          </section>
        </div>
      ) : episode.missing ? (
        <Problem parts={episode.missing} />
      ) : (
        <p class="empty">Of this episode the line alone is left: its tokens and texts have expired, or were never stored.</p>
      )}
    </>
  );
}

function TurnView({ turn, label, scale }: { turn: Turn; label: string; scale: Scale }) {
  const facts: [string, string][] = [];
  const add = (name: string, value: string | null | undefined) => value && value !== "–" && facts.push([name, value]);
  add("Path", turn.origin && !["prompt", "extended"].includes(turn.origin) ? plain(turn.origin) : null);
  add("Step reward", number(turn.reward));
  add("Version", turn.versions?.length ? turn.versions.map((each) => number(each)).join(", ") : null);
  add("Model", duration(turn.seconds_model));
  add("Tools", turn.seconds_tool ? duration(turn.seconds_tool) : null);
  add("Ended by", turn.finish ? plain(turn.finish) : null);
  add("Learned from", turn.trained === false ? "no" : null);
  return (
    <>
      {facts.length > 0 && (
        <p class="turn-facts">
          {facts.map(([name, value]) => (
            <span key={name}>
              <span class="muted">{name}</span> {value}
            </span>
          ))}
        </p>
      )}
      {turn.given && <Said title="Given">{turn.given}</Said>}
      {turn.text && <Said title="Answered">{turn.text}</Said>}
      {turn.calls?.map((call, i) => (
        <Said key={i} title={turn.ok === false ? "Called, and failed" : "Called"}>{`${call.name}(${call.arguments})`}</Said>
      ))}
      {turn.error && <p class="bad">{plain(turn.error)}</p>}
      {!!turn.tokens?.length && (
        <>
          <h3>Tokens</h3>
          <Tokens tokens={turn.tokens} scale={scale} label={label} />
        </>
      )}
      {!!turn.cut && <p class="note">{number(turn.cut)} more tokens are not shown.</p>}
    </>
  );
}

function Said({ title, children }: { title: string; children: string }) {
  return (
    <>
      <h3>{title}</h3>
      <Text>{children}</Text>
    </>
  );
}

function rewardWords(rewards: Record<string, unknown> | null | undefined): string | undefined {
  const words = Object.entries(rewards ?? {}).map(
    ([name, value]) => `${plain(name)} ${typeof value === "number" ? number(value) : plain(value)}`,
  );
  return words.length ? words.join(", ") : undefined;
}
