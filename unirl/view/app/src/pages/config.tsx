// The settings of a run, beside those of another one if that is asked for.

import { plain } from "../data/format";
import { useAnswer } from "../data/hooks";
import { setQuery } from "../data/route";
import type { Comparison, Run, RunRow } from "../data/types";
import { Loaded } from "../parts/controls";
import { ConfigTable } from "./compare";

export function ConfigTab({ run, query }: { run: Run; query: URLSearchParams }) {
  const other = query.get("with");
  const all = useAnswer<RunRow[]>("/api/runs");
  const ids = other ? [run.id, other] : [run.id];
  const answer = useAnswer<Comparison>(other ? "/api/compare" : null, { runs: ids.join(",") });
  const names = ids.map((id) => (id === run.id ? run.name : (all.data?.find((each) => each.id === id)?.name ?? id)));
  const own: Comparison = {
    keys: Object.entries(run.config ?? {}).map(([key, value]) => ({ key, values: [value], differs: false })),
  };
  return (
    <>
      {run.command && (
        <p class="command">
          <code>{plain(run.command)}</code>
        </p>
      )}
      <p class="bar">
        <label>
          Beside{" "}
          <select value={other ?? ""} onChange={(event) => setQuery({ with: event.currentTarget.value || null })}>
            <option value="">no other run</option>
            {all.data
              ?.filter((each) => each.id !== run.id)
              .map((each) => (
                <option key={each.id} value={each.id}>
                  {plain(each.name)}
                </option>
              ))}
          </select>
        </label>
      </p>
      {other ? (
        <Loaded answer={answer}>{(data) => <ConfigTable key={other} comparison={data} ids={ids} names={names} />}</Loaded>
      ) : (
        <ConfigTable key="own" comparison={own} ids={ids} names={names} />
      )}
    </>
  );
}
