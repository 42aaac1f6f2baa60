// Videos of the run's environments.

import { plain } from "../data/format";
import { useSource } from "../data/hooks";
import type { Run } from "../data/types";

export function VideosTab({ run }: { run: Run }) {
  const source = useSource();
  if (source.saved !== null) return <p class="empty">A saved page holds no videos.</p>;
  return (
    <div class="videos">
      {(run.videos ?? []).map((name) => (
        <figure key={name} class="panel">
          {name.toLowerCase().endsWith(".gif") ? (
            <img src={`/api/runs/${run.id}/videos/${encodeURIComponent(name)}`} alt={`Video ${plain(name)}`} />
          ) : (
            <video controls preload="metadata" src={`/api/runs/${run.id}/videos/${encodeURIComponent(name)}`} aria-label={`Video ${plain(name)}`} />
          )}
          <figcaption>{plain(name)}</figcaption>
        </figure>
      ))}
    </div>
  );
}
