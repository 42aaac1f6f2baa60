// What happened to the run and its members, as a list.

import { useEffect } from "preact/hooks";
import { duration, number, plain } from "../data/format";
import { useAnswer } from "../data/hooks";
import type { Run, RunEvent } from "../data/types";
import { Loaded } from "../parts/controls";
import { kindOf, SIGNS } from "../parts/marks";

export function EventsTab({ run, news }: { run: Run; news: number }) {
  const answer = useAnswer<RunEvent[]>(`/api/runs/${run.id}/events`);
  useEffect(() => {
    if (news) answer.reload();
  }, [news]);
  return (
    <section class="panel" aria-label="Events">
      <Loaded answer={answer}>{(events) => <EventList events={events} limit={1000} />}</Loaded>
    </section>
  );
}

export function EventList({ events, limit }: { events: RunEvent[]; limit: number }) {
  if (!events.length) return <p class="empty">None.</p>;
  const shown = events.slice(-limit).reverse();
  return (
    <>
      <div class="scroll" tabIndex={0} role="region" aria-label="Events, newest first">
        <table class="events">
          <thead>
            <tr>
              <th scope="col">Event</th>
              <th scope="col">Who</th>
              <th scope="col" class="numeric">
                At
              </th>
              <th scope="col" class="numeric minor">
                Step
              </th>
              <th scope="col">Cause</th>
            </tr>
          </thead>
          <tbody>
            {shown.map((event, i) => (
              <tr key={events.length - i}>
                <td>
                  <span class={`kind ${kindOf(event)}`} aria-hidden="true">
                    {SIGNS[kindOf(event)]}
                  </span>{" "}
                  {plain(event.event).replace("_", " ")}
                </td>
                <td>{plain(event.member ?? event.pool ?? event.agent)}</td>
                <td class="numeric">{typeof event.seconds === "number" ? duration(event.seconds) : timeOfDay(event.time)}</td>
                <td class="numeric minor">{number(event.step)}</td>
                <td class="text">{[event.size !== undefined ? `to ${number(event.size)}` : "", event.cause ? plain(event.cause) : "", event.node ? `on ${plain(event.node)}` : ""].filter(Boolean).join(", ")}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {events.length > limit && <p class="note">The newest {limit} of {number(events.length)}.</p>}
    </>
  );
}

function timeOfDay(time: number | undefined): string {
  return typeof time === "number" ? new Date(time * 1000).toLocaleTimeString() : "–";
}
