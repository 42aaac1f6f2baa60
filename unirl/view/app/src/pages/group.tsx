// The samples of one ticket side by side: what was tried, and what each earned.

import { duration, number, plain, plural } from "../data/format";
import { useAnswer } from "../data/hooks";
import { link } from "../data/route";
import type { Group, Run } from "../data/types";
import { Loaded, Title } from "../parts/controls";
import { Text } from "../parts/text";

export function GroupPage({ run, ticket }: { run: Run; ticket: string }) {
  const answer = useAnswer<Group>(`/api/runs/${run.id}/groups/${encodeURIComponent(ticket)}`);
  return (
    <>
      <nav class="crumbs" aria-label="Where this is">
        <a href={link(["runs", run.id])}>{plain(run.name)}</a> / <a href={link(["runs", run.id, "episodes"])}>episodes</a>
      </nav>
      <Title>{`Ticket ${plain(ticket)}`}</Title>
      <Loaded answer={answer}>{(group) => <Members run={run} group={group} />}</Loaded>
    </>
  );
}

function Members({ run, group }: { run: Run; group: Group }) {
  const { rows } = group;
  const rewards = rows.flatMap((row) => (typeof row.reward === "number" ? [row.reward] : []));
  const mean = rewards.reduce((sum, value) => sum + value, 0) / (rewards.length || 1);
  return (
    <>
      <p>
        {plural(rows.length, "episode")}
        {rewards.length ? `, mean reward ${number(mean)}, from ${number(Math.min(...rewards))} to ${number(Math.max(...rewards))}` : ""}
      </p>
      {group.prompt && (
        <section class="panel" aria-label="Prompt">
          <h2>Prompt</h2>
          <Text most={2000}>{group.prompt}</Text>
        </section>
      )}
      <div class="group">
        {rows.map((row) => {
          const gain = typeof row.reward === "number" && rewards.length > 1 ? row.reward - mean : 0;
          return (
            <article key={row.id} class={`panel ${gain > 0 ? "above" : gain < 0 ? "below" : ""}`}>
              <h2>
                <a href={link(["runs", run.id, "episodes", row.id])}>Episode {plain(String(row.id))}</a>
              </h2>
              <p class="reward">
                {number(row.reward)} <span class="muted">{gain === 0 ? "" : `${gain > 0 ? "+" : "−"}${number(Math.abs(gain), 3)} against the mean`}</span>
              </p>
              <p class="muted">
                {[plain(row.ending), typeof row.turns === "number" ? plural(row.turns, "turn") : "", typeof row.tokens === "number" ? plural(row.tokens, "token") : "", row.seconds ? duration(row.seconds) : ""].filter(Boolean).join(" · ")}
              </p>
              <Text most={1200}>{row.text ?? ""}</Text>
            </article>
          );
        })}
      </div>
    </>
  );
}
