// Videos of the run's environments.

import { bytes, plain } from "../data/format";
import { useSource } from "../data/hooks";
import type { Run, Video } from "../data/types";

export function VideosTab({ run }: { run: Run }) {
  return (
    <div class="videos">
      {(run.videos ?? []).map((video) => (
        <figure key={video.name} class="panel">
          <Film video={video} path={`/api/runs/${run.id}/videos/${encodeURIComponent(video.name)}`} />
          <figcaption>
            {plain(video.name)} <span class="muted">{bytes(video.bytes)}</span>
          </figcaption>
        </figure>
      ))}
    </div>
  );
}

function Film({ video, path }: { video: Video; path: string }) {
  const where = useSource().file(path);
  const label = `Video ${plain(video.name)}`;
  if (where === null) return <p class="empty">There was no room for it in this page.</p>;
  if (video.name.toLowerCase().endsWith(".gif")) return <img src={where} alt={label} />;
  return <video controls preload="metadata" src={where} aria-label={label} />;
}
