// Configs side by side; what differs is marked, and comes first.

import { useState } from "preact/hooks";
import { plain, plural } from "../data/format";
import { useAnswer } from "../data/hooks";
import { link } from "../data/route";
import type { Comparison, RunRow } from "../data/types";
import { Loaded, Title } from "../parts/controls";

export function ComparePage({ query }: { query: URLSearchParams }) {
  const ids = (query.get("runs") ?? "").split(",").filter(Boolean);
  const answer = useAnswer<Comparison>(ids.length ? "/api/compare" : null, { runs: ids.join(",") });
  const runs = useAnswer<RunRow[]>("/api/runs");
  const names = ids.map((id) => runs.data?.find((run) => run.id === id)?.name ?? id);
  return (
    <>
      <Title>Configs side by side</Title>
      {ids.length ? (
        <Loaded answer={answer}>{(data) => <ConfigTable comparison={data} ids={ids} names={names} />}</Loaded>
      ) : (
        <p class="empty">Choose runs in the list of runs first.</p>
      )}
    </>
  );
}

export function ConfigTable({ comparison, ids, names }: { comparison: Comparison; ids: string[]; names: string[] }) {
  const [text, setText] = useState("");
  const [isAll, setAll] = useState(ids.length < 2);
  const differing = comparison.keys.filter((key) => key.differs).length;
  const rows = comparison.keys.filter(({ key, differs }) => (isAll || differs) && key.includes(text.trim()));
  return (
    <section class="panel" aria-label="Settings">
      <div class="bar">
        <label class="search">
          <span class="hidden">Filter settings</span>
          <input type="search" placeholder="Filter settings: learner.optimizer …" value={text} onInput={(event) => setText(event.currentTarget.value)} />
        </label>
        {ids.length > 1 && (
          <label class="check">
            <input type="checkbox" checked={isAll} onChange={(event) => setAll(event.currentTarget.checked)} />
            Those that are equal, too
          </label>
        )}
        <span class="count" role="status">
          {ids.length > 1 ? `${plural(differing, "setting")} of ${comparison.keys.length} ${differing === 1 ? "differs" : "differ"}` : plural(rows.length, "setting")}
        </span>
      </div>
      <div class="scroll" tabIndex={0} role="region" aria-label="Settings">
        <table class="config">
          <thead>
            <tr>
              <th scope="col">Setting</th>
              {ids.map((id, i) => (
                <th scope="col" key={id}>
                  <a href={link(["runs", id])}>{plain(names[i])}</a>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map(({ key, values, differs }) => (
              <tr key={key} class={differs ? "differs" : ""}>
                <th scope="row">
                  {differs && <span class="mark" role="img" aria-label="differs">≠</span>} {key}
                </th>
                {values.map((value, i) => (
                  <td key={ids[i]}>{plain(value)}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {!rows.length && <p class="empty">{differing || text ? "No such setting." : "All settings are equal."}</p>}
    </section>
  );
}
